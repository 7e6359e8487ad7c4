// Captured steps as CUDA graphs: the work issued to the stream between begin and end becomes one
// graph. Owns the host memory from which the graph copies to the card. A script's garbage collector
// may ask to free device memory during a capture. To free it, the host must wait for the stream,
// which a capture forbids. So this file frees that memory when the capture ends. Called by
// device.cu, and through the table (core/autograd/capture.c).
#include "device.h"
#include "runtime.h"

#include <stdlib.h>
#include <string.h>

struct kept_piece {
  kept_piece *next;
  void *memory;      // pinned memory in the list `kept`, device memory in the list `later`
};

struct step_graph {
  cudaGraphExec_t launchable;
  kept_piece *kept;
  step_graph *next;          // in the list of graphs to free
};

static bool capturing;
static kept_piece *kept;
// device memory and graphs to free when the capture ends
static struct { kept_piece *memory; step_graph *graphs; } later;

bool cuda_capturing(void) { return capturing; }

bool cuda_give_later(void *memory)
{
  if (!capturing) return false;
  kept_piece *piece = (kept_piece *)malloc(sizeof *piece);
  if (!piece) return true;   // leaks `memory`, which cannot be freed during a capture
  *piece = {later.memory, memory};
  later.memory = piece;
  return true;
}

static void give_pieces(kept_piece *list, bool pinned)
{
  while (list) {
    kept_piece *next = list->next;
    if (pinned) cudaFreeHost(list->memory);
    else cuda_give(list->memory, 0);
    free(list);
    list = next;
  }
}

static void give_later(void)
{
  give_pieces(later.memory, false);
  later.memory = NULL;
  while (later.graphs) {
    step_graph *next = later.graphs->next;
    cuda_graph_free(later.graphs);
    later.graphs = next;
  }
}

void *cuda_capture_keep(const void *bytes, int64_t size)
{
  kept_piece *piece = (kept_piece *)malloc(sizeof *piece);
  if (!piece || cudaMallocHost(&piece->memory, (size_t)size) != cudaSuccess) {
    cudaGetLastError();
    free(piece);
    error_set(ENG_ERR_MEMORY, "graph: out of pinned memory for %lld bytes; hint: graph=false",
              (long long)size);
    return NULL;
  }
  memcpy(piece->memory, bytes, (size_t)size);
  piece->next = kept;
  kept = piece;
  return piece->memory;
}

eng_status cuda_capture_begin(void)
{
  CUDA_TRY(cudaStreamBeginCapture(cuda_stream(), cudaStreamCaptureModeRelaxed));
  capturing = true;
  kept = NULL;
  return ENG_OK;
}

eng_status cuda_capture_end(void **out)
{
  cudaGraph_t noted = NULL;
  step_graph *graph = (step_graph *)calloc(1, sizeof *graph);
  cudaError_t result = cudaStreamEndCapture(cuda_stream(), &noted);
  capturing = false;
  give_later();
  *out = NULL;
  if (result == cudaSuccess && graph) result = cudaGraphInstantiate(&graph->launchable, noted, 0);
  if (noted) cudaGraphDestroy(noted);
  if (result != cudaSuccess || !graph) {
    cudaGetLastError();
    give_pieces(kept, true);
    kept = NULL;
    FAIL_IF(!graph, ENG_ERR_MEMORY,
            "graph: out of memory on the host for a captured step; hint: graph=false");
    free(graph);
    return cuda_status(result, "capturing a step");
  }
  graph->kept = kept;
  kept = NULL;
  *out = graph;
  return ENG_OK;
}

eng_status cuda_graph_launch(void *handle)
{
  CUDA_TRY(cudaGraphLaunch(((step_graph *)handle)->launchable, cuda_stream()));
  return ENG_OK;
}

void cuda_graph_free(void *handle)
{
  step_graph *graph = (step_graph *)handle;
  if (!graph) return;
  if (capturing) {
    graph->next = later.graphs;
    later.graphs = graph;
    return;
  }
  cudaStreamSynchronize(cuda_stream());
  cudaGraphExecDestroy(graph->launchable);
  give_pieces(graph->kept, true);
  free(graph);
}
