// A captured step: the device runs the forward and backward pass of one batch in a single launch.
// This is for steps so small that launching their kernels one by one takes longer than running
// them. A capture contains only the device's work, with fixed addresses. So a launch needs its
// batch at the addresses of the captured batch. The arena gives a step these addresses again if the
// step begins with the same allocations. Operations that draw random numbers fail during a capture,
// because the host, not the device, advances the random counter. Owns the captured graphs. Called
// by Lua; backward.c calls capture_takes_seed.
#include "base/error.h"
#include "gradient.h"
#include "params/params.h"
#include "device/transfer.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_INPUTS = 16 };

typedef struct graph_input {
  void   *data;
  int32_t dtype, ndim;
  int64_t shape[ENG_MAX_DIMS];
} graph_input;

/// The addresses of a parameter's gradient and low-precision copy, and the stamp of its derived
/// (FP8) copy, at the end of the capture. A launch is valid only if they have not changed.
typedef struct graph_places {
  const void  *gradient, *low;
  params_stamp derived;
  bool         has_gradient;    // the parameter has a gradient after the step
} graph_places;

struct eng_graph {
  const backend *device;
  void          *captured;      // the device's graph; NULL until the end of the capture
  eng_params    *set;
  void          *seed;          // address of the loss's gradient
  int32_t        seed_dtype, n_inputs;
  graph_input    input[MOST_INPUTS];
  tensor        *loss;          // a tensor over the step's memory
  graph_places   places[];      // [set->n]
};

static eng_graph *capturing;

bool capture_takes_seed(const tensor *seed)
{
  if (!capturing) return false;
  capturing->seed = seed->data;
  capturing->seed_dtype = seed->dtype;
  return true;
}

// ---- inputs and addresses

static eng_status read_inputs(graph_input *input, const eng_tensor *tensors, int n)
{
  FAIL_IF(n < 0 || n > MOST_INPUTS, ENG_ERR_VALUE,
          "graph: expected 0 to %d tensors in a batch, got %d", MOST_INPUTS, n);
  memset(input, 0, MOST_INPUTS * sizeof *input);   // clears padding: inputs are compared as bytes
  for (int i = 0; i < n; i++) {
    tensor *x;
    ENG_TRY(tensor_get(&x, &tensors[i]));
    FAIL_IF(!tensor_contiguous(x), ENG_ERR_VALUE,
            "graph: expected contiguous tensors in a batch, got a view %s as tensor %d; hint: "
            "x:contiguous()", tensor_text(x), i + 1);
    input[i].data = x->data;
    input[i].dtype = x->dtype;
    input[i].ndim = x->ndim;
    memcpy(input[i].shape, x->shape, (size_t)x->ndim * sizeof *x->shape);
  }
  return ENG_OK;
}

static graph_places places_of(const parameter *p)
{
  return (graph_places){p->gradient ? p->gradient->data : NULL, p->low ? p->low->data : NULL,
                        p->derived ? p->derived->stamp(p->derived) : (params_stamp){0},
                        p->has_gradient};
}

static bool same_places(const graph_places *places, const eng_params *set)
{
  for (int i = 0; i < set->n; i++) {
    const graph_places now = places_of(&set->member[i]), then = places[i];
    if (now.gradient != then.gradient || now.low != then.low ||
        now.derived.memory != then.derived.memory || now.derived.maker != then.derived.maker ||
        now.derived.version != then.derived.version)
      return false;
  }
  return true;
}

/// Marks the derived copies of the weights as out of date. Called before a capture, so that the
/// capture records the computation of the copies and every launch repeats it. Called again after
/// the capture, because the capture recorded this computation without running it.
static void outdate_copies(eng_params *set)
{
  for (int i = 0; i < set->n && !set->freed; i++) {
    params_derived *derived = set->member[i].derived;
    if (derived) derived->outdate(derived);
  }
}

// ---- capturing

void eng_graph_free(eng_graph *graph)
{
  if (!graph) return;
  if (graph == capturing) {
    capturing = NULL;
    backend_capturing(false);
    void *unfinished = NULL;
    if (graph->device->capture_end(&unfinished) == ENG_OK) graph->device->graph_free(unfinished);
    outdate_copies(graph->set);
  }
  if (graph->captured) graph->device->graph_free(graph->captured);
  arena_pin(graph->device->space, -1);
  tensor_drop(graph->loss);
  params_release(graph->set);
  free(graph);
}

eng_status eng_graph_begin(eng_graph **out, eng_params *set, const eng_tensor *batch, int n)
{
  const backend *device = backend_current();
  *out = NULL;
  ENG_TRY(params_alive(set));
  FAIL_IF(capturing, ENG_ERR_STATE, "graph: a capture is already running; "
          "hint: call eng_graph_end or eng_graph_free first");
  ENG_TRY(params_here(set, "a capture"));
  FAIL_IF(!device->capture_begin, ENG_ERR_DEVICE, "graph: the device %s cannot capture steps; "
          "hint: device=cuda, or graph=false", device->name);
  graph_input input[MOST_INPUTS];
  ENG_TRY(read_inputs(input, batch, n));
  ENG_TRY(params_gradients(set));
  // Rounds the weights before the capture. If the capture recorded this, every launch would repeat
  // it.
  ENG_TRY(params_round_written(set));
  eng_graph *graph = calloc(1, sizeof *graph + (size_t)set->n * sizeof *graph->places);
  FAIL_IF(!graph, ENG_ERR_MEMORY, "out of memory for a captured step");
  graph->device = device;
  graph->set = set;
  graph->n_inputs = n;
  memcpy(graph->input, input, sizeof input);
  set->references++;
  outdate_copies(set);
  // launches use the memory that the capture used and freed, so it must not return to the system
  arena_pin(device->space, 1);
  eng_status status = device->capture_begin();
  if (status != ENG_OK) {
    eng_graph_free(graph);
    return status;
  }
  capturing = graph;
  backend_capturing(true);
  *out = graph;
  return ENG_OK;
}

eng_status eng_graph_end(eng_graph *graph, const eng_tensor *loss)
{
  tensor *x;
  FAIL_IF(graph != capturing || !graph, ENG_ERR_STATE, "graph: this step is not being "
          "captured; hint: call eng_graph_begin first");
  ENG_TRY(tensor_get(&x, loss));
  FAIL_IF(x->count != 1 || x->dtype != ENG_f32, ENG_ERR_DTYPE,
          "graph: expected a loss of one f32 element, got %s", tensor_text(x));
  FAIL_IF(!graph->seed, ENG_ERR_STATE, "graph: no backward pass was captured; hint: call "
          "backward() before eng_graph_end");
  ENG_TRY(tensor_wrap(&graph->loss, graph->device->space, x->data, ENG_f32, 0, NULL));
  for (int i = 0; i < graph->set->n; i++) graph->places[i] = places_of(&graph->set->member[i]);
  capturing = NULL;
  backend_capturing(false);
  outdate_copies(graph->set);
  return graph->device->capture_end(&graph->captured);
}

eng_status eng_graph_launch(eng_graph *graph, double seed, const eng_tensor *batch, int n)
{
  FAIL_IF(!graph->captured, ENG_ERR_STATE, "graph: the capture of this step was not "
          "finished; hint: call eng_graph_end first");
  ENG_TRY(params_alive(graph->set));
  graph_input input[MOST_INPUTS];
  ENG_TRY(read_inputs(input, batch, n));
  FAIL_IF(n != graph->n_inputs || memcmp(input, graph->input, (size_t)n * sizeof *input) != 0,
          ENG_ERR_SHAPE, "graph: the batch has other shapes, dtypes or addresses than the "
          "captured batch; hint: run this step without the graph");
  FAIL_IF(!same_places(graph->places, graph->set), ENG_ERR_STATE,
          "graph: the parameters' gradients or low-precision copies have other addresses or "
          "formats than at the capture; hint: capture the step again");
  ENG_TRY(params_round_written(graph->set));
  char cell[8];
  tensor_store(cell, graph->seed_dtype, 0, seed);
  ENG_TRY(
    transfer_from_host(graph->device->space, graph->seed, cell, eng_dtype_size(graph->seed_dtype)));
  ENG_TRY(graph->device->graph_launch(graph->captured));
  for (int i = 0; i < graph->set->n; i++)
    graph->set->member[i].has_gradient = graph->places[i].has_gradient;
  return ENG_OK;
}

eng_status eng_graph_loss(eng_tensor *out, const eng_graph *graph)
{
  *out = tensor_handle(graph->loss);
  return graph->loss
         ? ENG_OK
         : error_set(ENG_ERR_STATE, "graph: the capture of this step was not finished; hint: "
                                    "call eng_graph_end first");
}
