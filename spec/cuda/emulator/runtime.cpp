// The part of the CUDA run-time library that cuda/ calls, on the host. A stream is a list of tasks.
// With run=late a task runs only when the host waits for it, which exposes code that reads results
// without waiting. Owns streams, events, graphs and memory. Called by the sources of cuda/.
#include "runtime.h"
#include "../fake.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sched.h>
#include <string_view>
#include <sys/mman.h>
#include <unistd.h>

namespace emulator {

// ------------------------------------------------------------------ settings

const settings &set(void)
{
  static settings s = [] {
    settings made = {90, FORWARDS, true, 2048, 2048, false, nullptr};
    const char *text = getenv("ENGINE_EMULATED_CARD");
    static char kept[4096];
    snprintf(kept, sizeof kept, "%s", text ? text : "");
    for (char *word = strtok(kept, ","); word; word = strtok(nullptr, ",")) {
      char *value = strchr(word, '=');
      if (value) *value++ = 0;
      const std::string_view name = word, v = value ? value : "";
      if (name == "sm") made.capability = atoi(value);
      else if (name == "order" && (v == "forwards" || v == "backwards" || v == "shuffled"))
        made.order = v[0] == 'f' ? FORWARDS : v[0] == 'b' ? BACKWARDS : SHUFFLED;
      else if (name == "run" && (v == "late" || v == "early")) made.late = v == "late";
      else if (name == "memory") made.memory = atol(value);
      else if (name == "pinned") made.pinned = atol(value);
      else if (name == "closed") made.closed = v == "1";
      else if (name == "trace" && value) made.trace = value;
      else {
        fprintf(stderr,
                "ENGINE_EMULATED_CARD: expected sm=90, order=forwards|backwards|shuffled, "
                "run=late|early, memory=MiB, pinned=MiB, closed=1, trace=FILE, got %s\n",
                word);
        exit(2);
      }
    }
    return made;
  }();
  return s;
}

static void trace(const char *what, const char *detail)
{
  static FILE *file = set().trace ? fopen(set().trace, "w") : nullptr;
  if (!file) return;
  fprintf(file, "%s %s\n", what, detail);
  fflush(file);
}

// ------------------------------------------------------------------ errors

static cudaError_t sticky = cudaSuccess, last = cudaSuccess;

static cudaError_t failed(cudaError_t error) { return last = error; }

/// Every call fails after a fault.
#define ALIVE() do { if (sticky != cudaSuccess) return failed(sticky); } while (0)

// ------------------------------------------------------------------ memory

struct piece { size_t bytes, mapped; bool pinned; };
static std::map<char *, piece> pieces;         // by address; device memory and pinned host memory
static size_t device_bytes, pinned_bytes;
static int opened;                             // depth of running work

static const piece *piece_of(const void *p)
{
  auto next = pieces.upper_bound((char *)p);
  if (next == pieces.begin()) return nullptr;
  --next;
  return (char *)p < next->first + next->second.bytes ? &next->second : nullptr;
}

static bool on_device(const void *p) { const piece *x = piece_of(p); return x && !x->pinned; }
static bool pinned(const void *p)    { const piece *x = piece_of(p); return x && x->pinned; }

static void protect(int mode)
{
  if (!set().closed) return;
  for (const auto &[at, p] : pieces)
    if (!p.pinned) mprotect(at, p.mapped, mode);
}

static cudaError_t take(void **out, size_t bytes, bool is_pinned)
{
  ALIVE();
  if ((is_pinned ? pinned_bytes : device_bytes) + bytes >
      (size_t)(is_pinned ? set().pinned : set().memory) << 20)
    return failed(cudaErrorMemoryAllocation);
  const size_t mapped = (bytes + 4095) / 4096 * 4096;
  // with an inaccessible page after it
  char *at = (char *)mmap(nullptr, mapped + 4096, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
  mprotect(at, mapped, PROT_READ | PROT_WRITE);
  memset(at, 0xFF, bytes < (64u << 20) ? bytes : 64u << 20);   // NaN
  CLOSE(at + bytes, mapped - bytes);
  if (!is_pinned && !opened && set().closed) mprotect(at, mapped, PROT_NONE);
  pieces[at] = {bytes, mapped, is_pinned};
  (is_pinned ? pinned_bytes : device_bytes) += bytes;
  *out = at;
  return cudaSuccess;
}

static cudaError_t give(void *p, bool is_pinned)
{
  if (!p) return cudaSuccess;
  auto found = pieces.find((char *)p);
  if (found == pieces.end() || found->second.pinned != is_pinned)
    return failed(cudaErrorInvalidValue);
  OPEN(p, found->second.mapped);
  munmap(p, found->second.mapped + 4096);
  (is_pinned ? pinned_bytes : device_bytes) -= found->second.bytes;
  pieces.erase(found);
  return cudaSuccess;
}

// ---- streams: those of ../fake.h, which the fake NCCL also uses

struct task {
  std::function<void()> run;
  const char *what;
};
typedef std::vector<task> recording;

struct work : fake_task { std::function<void()> body; };

static int run_work(fake_task *t)
{
  ((work *)t)->body();
  return 1;
}

static void lane_opens(void)  { if (opened++ == 0) protect(PROT_READ | PROT_WRITE); }
static void lane_closes(void) { if (--opened == 0) protect(PROT_NONE); }

}

struct CUstream_st {
  fake_lane lane;
  emulator::recording *capture;
  bool spoiled;                                // the capture met a call that cannot be captured
};

struct CUevent_st {
  CUstream_st *on;
  long ticket;                                 // its position in `on` when recorded
  double time;                                 // milliseconds when reached
};

struct CUgraph_st { emulator::recording tasks; };
struct CUgraphExec_st { emulator::recording tasks; };

namespace emulator {

static std::vector<CUstream_st *> streams;

static double milliseconds(void)
{
  return std::chrono::duration<double, std::milli>(
           std::chrono::steady_clock::now().time_since_epoch())
    .count();
}

/// Tries the next task of a stream. 1: done, 0: it waits for other ranks.
static int advance(CUstream_st *s)
{
  fake_task *t = s->lane.first;
  lane_opens();
  const int ran = t->run(t);
  lane_closes();
  if (ran < 0) {
    fprintf(stderr, "emulated card: %s failed\n", t->what);
    sticky = cudaErrorLaunchFailure;
  }
  if (ran != 1) return 0;
  s->lane.first = t->next;
  s->lane.done++;
  if (t->run == run_work) delete (work *)t;
  else free(t);
  return 1;
}

/// Runs a stream's tasks up to `ticket`.
static void drain(CUstream_st *s, long ticket)
{
  while (s->lane.done < ticket && sticky == cudaSuccess)
    if (!advance(s)) sched_yield();
}

static cudaError_t push(CUstream_st *s, const char *what, std::function<void()> run,
                        bool captured = true)
{
  ALIVE();
  if (s->capture && captured) {
    s->capture->push_back({std::move(run), what});
    return cudaSuccess;
  }
  work *w = new work();
  w->body = std::move(run);
  fake_lane_push(&s->lane, w, run_work, what);
  if (!set().late || s->lane.asked - s->lane.done > 4096) drain(s, s->lane.asked);
  return sticky == cudaSuccess ? cudaSuccess : failed(sticky);
}

/// For calls that are not allowed during a capture: whether the stream is being captured. If so,
/// the capture is lost.
static bool spoils(CUstream_st *s)
{
  if (!s->capture) return false;
  s->spoiled = true;
  return true;
}

void launch_later(const char *name, const shape &at, std::function<void()> body)
{
  const dim3 grid = at.grid, threads = at.block;
  const size_t shared = at.shared;
  char text[300];
  snprintf(text, sizeof text, "%s %u %u", name, grid.x * grid.y * grid.z,
           threads.x * threads.y * threads.z);
  trace("launch", text);
  const uint64_t count = (uint64_t)threads.x * threads.y * threads.z;
  if (count == 0 || count > MOST_THREADS || threads.z > 64 || grid.x == 0 || grid.y == 0 ||
      grid.z == 0 || grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535 || shared > 227 << 10) {
    failed(cudaErrorInvalidConfiguration);
    return;
  }
  push(at.stream, name, [=] {
    if (!run_grid(name, grid, threads, shared, body)) sticky = cudaErrorLaunchFailure;
  });
}

cudaError_t work_later(const char *name, cudaStream_t stream, std::function<void()> work)
{
  trace("launch", name);
  return push(stream, name, std::move(work));
}

/// Memory that the arenas hand out begins as NaN and is accessible until it is given back, in order
/// with the work that uses it. Memory taken in a captured step becomes accessible before the step
/// runs, and stays so (core/tensor/arena.c).
extern "C" cudaStream_t cuda_stream(void);
extern "C" void card_mark(void *memory, int64_t bytes, bool out)
{
  CUstream_st *s = cuda_stream();
  if (!out && s->capture) return;
  push(s, out ? "memory taken" : "memory given back", [=] {
    if (!out) {
      CLOSE(memory, bytes);
      return;
    }
    OPEN(memory, bytes);
    memset(memory, 0xFF, (size_t)bytes);
  }, false);
}

/// For cublaslt.c: queues a call with a copy of its arguments.
extern "C" void card_later(void (*run)(const void *), const void *what, size_t bytes,
                           cudaStream_t stream)
{
  std::vector<char> kept((const char *)what, (const char *)what + bytes);
  trace("launch", "cublasLtMatmul");
  push(stream, "cublasLtMatmul", [run, kept] { run(kept.data()); });
}

}

using namespace emulator;

extern "C" {

cudaError_t cudaGetLastError(void)
{
  cudaError_t was = last;
  last = cudaSuccess;
  return sticky != cudaSuccess ? sticky : was;
}
cudaError_t cudaPeekAtLastError(void) { return sticky != cudaSuccess ? sticky : last; }

const char *cudaGetErrorName(cudaError_t error)
{
  return error == cudaErrorMemoryAllocation         ? "cudaErrorMemoryAllocation" :
         error == cudaErrorLaunchFailure            ? "cudaErrorLaunchFailure" :
         error == cudaErrorInvalidConfiguration     ? "cudaErrorInvalidConfiguration" :
         error == cudaErrorStreamCaptureInvalidated ? "cudaErrorStreamCaptureInvalidated" :
         error == cudaErrorStreamCaptureUnsupported ? "cudaErrorStreamCaptureUnsupported" :
         error == cudaErrorInvalidValue             ? "cudaErrorInvalidValue" :
                                                      "cudaError";
}
const char *cudaGetErrorString(cudaError_t error)
{
  return error == cudaErrorMemoryAllocation ?
           "out of memory" :
         error == cudaErrorLaunchFailure ?
           "unspecified launch failure" :
         error == cudaErrorInvalidConfiguration ?
           "invalid configuration argument" :
         error == cudaErrorStreamCaptureInvalidated ?
           "operation failed due to a previous error during capture" :
         error == cudaErrorStreamCaptureUnsupported ?
           "operation not permitted when stream is capturing" :
           "invalid argument";
}

// ------------------------------------------------------------------ the card

static int version_from(const char *name, int otherwise)
{
  const char *text = getenv(name);
  return text && *text ? atoi(text) : otherwise;
}

cudaError_t cudaDriverGetVersion(int *version)
{
  *version = version_from("ENGINE_EMULATED_DRIVER", CUDART_VERSION);
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *count)
{
  *count = version_from("ENGINE_EMULATED_DEVICES", 1);
  return *count > 0 ? cudaSuccess : failed(cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int)
{
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "emulated card");
  p->major = set().capability / 10;
  p->minor = set().capability % 10;
  p->multiProcessorCount = 3;
  p->totalGlobalMem = (size_t)set().memory << 20;
  // lets several processes share one card, as in spec/cuda/fake.h
  const char *name = getenv("FAKE_CARD");
  if (name) snprintf(p->uuid.bytes, sizeof p->uuid.bytes, "%.15s", name);
  else snprintf(p->uuid.bytes, sizeof p->uuid.bytes, "%d", (int)getpid());
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute attribute, int value)
{
  return attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value > 227 << 10 ?
           failed(cudaErrorInvalidValue) :
           cudaSuccess;
}

/// The driver's function, for the boxes that attention copies. Refuses what the driver refuses.
static CUresult map_boxes(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *data,
                          const cuuint64_t *size, const cuuint64_t *stride, const cuuint32_t *box,
                          const cuuint32_t *step, CUtensorMapInterleave interleave,
                          CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                          CUtensorMapFloatOOBfill)
{
  bool good = type == CU_TENSOR_MAP_DATA_TYPE_UINT16 && rank == 4 && data &&
              (uintptr_t)data % 16 == 0 && box[0] == 64 && box[1] >= 1 && box[1] <= 256 &&
              box[2] == 1 && box[3] == 1 && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
              swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  box_map made = {(const uint16_t *)data, {}, {1}, box[1]};
  for (int d = 0; d < 4; d++) {
    good = good && size[d] >= 1 && size[d] <= 1ull << 32 && step[d] == 1;
    made.size[d] = size[d];
    if (d == 3) break;
    good = good && stride[d] > 0 && stride[d] % 16 == 0 && stride[d] < 1ull << 40;
    made.stride[d + 1] = stride[d] / 2;
  }
  if (!good) return CUDA_ERROR_INVALID_VALUE;
  memcpy(map, &made, sizeof made);
  return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult *found)
{
  const bool known = !strcmp(name, "cuTensorMapEncodeTiled");
  *function = known ? (void *)map_boxes : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// ------------------------------------------------------------------ memory and copies

cudaError_t cudaMalloc(void **out, size_t bytes)     { return take(out, bytes, false); }
cudaError_t cudaMallocHost(void **out, size_t bytes) { return take(out, bytes, true); }
cudaError_t cudaFreeHost(void *p)                    { return give(p, true); }
cudaError_t cudaFree(void *p)
{
  for (CUstream_st *s : streams) drain(s, s->lane.asked);   // as on a real card
  return give(p, false);
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *all)
{
  *all = (size_t)set().memory << 20;
  *free_bytes = *all - device_bytes;
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t s)
{
  if (!on_device(to) || (bytes > 0 && !on_device((char *)to + bytes - 1)))
    return failed(cudaErrorInvalidValue);
  trace("set", "");
  return push(s, "cudaMemset", [=] { memset(to, value, bytes); });
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t s)
{
  const bool to_device = kind != cudaMemcpyDeviceToHost,
             from_device = kind != cudaMemcpyHostToDevice;
  if (bytes == 0) return cudaSuccess;
  if (on_device(to) != to_device || on_device(from) != from_device ||
      (to_device && !on_device((char *)to + bytes - 1)) ||
      (from_device && !on_device((const char *)from + bytes - 1)))
    return failed(cudaErrorInvalidValue);
  if (to_device && from_device) {
    trace("copy", "inside");
    return push(s, "copy inside", [=] { memmove(to, from, bytes); });
  }
  const bool pageable = !pinned(to_device ? from : to);
  trace("copy", to_device ? pageable ? "to the card from pageable memory" : "to the card" :
                pageable  ? "to pageable memory (waits)" :
                            "to the host");
  if (pageable && spoils(s)) return failed(cudaErrorStreamCaptureUnsupported);
  if (to_device && pageable) {   // the source may change after this returns
    std::vector<char> kept((const char *)from, (const char *)from + bytes);
    return push(s, "copy to the card", [to, kept] { memcpy(to, kept.data(), kept.size()); });
  }
  cudaError_t result = push(s, "copy", [=] { memcpy(to, from, bytes); });
  if (pageable && result == cudaSuccess) drain(s, s->lane.asked);
  return result;
}

// ------------------------------------------------------------------ streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned, int)
{
  streams.push_back(*out = new CUstream_st());
  (*out)->lane.open = lane_opens;
  (*out)->lane.close = lane_closes;
  (*out)->lane.on_card = on_device;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags)
{ return cudaStreamCreateWithPriority(out, flags, 0); }

cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
  trace("wait", "stream");
  ALIVE();
  if (spoils(s)) return failed(cudaErrorStreamCaptureUnsupported);
  drain(s, s->lane.asked);
  return sticky != cudaSuccess ? failed(sticky) : cudaSuccess;
}

/// A query advances a stream by one task, so that polling ends eventually.
static cudaError_t ask(CUstream_st *s, long ticket)
{
  ALIVE();
  if (spoils(s)) return failed(cudaErrorStreamCaptureUnsupported);
  if (s->lane.done >= ticket) return cudaSuccess;
  advance(s);
  return sticky != cudaSuccess  ? failed(sticky) :
         s->lane.done >= ticket ? cudaSuccess :
                                  failed(cudaErrorNotReady);
}
cudaError_t cudaStreamQuery(cudaStream_t s) { return ask(s, s->lane.asked); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned)
{
  *out = new CUevent_st();
  return cudaSuccess;
}
cudaError_t (cudaEventCreate)(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e)
{
  if (e->on) drain(e->on, e->ticket);   // the stream still has to mark the event
  delete e;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
  // cuda/ captures only one stream
  if (spoils(s)) return failed(cudaErrorStreamCaptureUnsupported);
  trace("mark", "");
  e->on = s;
  e->ticket = s->lane.asked + 1;
  return push(s, "mark", [e] { e->time = milliseconds(); });
}
cudaError_t cudaEventQuery(cudaEvent_t e) { return e->on ? ask(e->on, e->ticket) : cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
  char text[80] = "event, already reached";
  if (e->on && e->on->lane.done < e->ticket)
    snprintf(text, sizeof text, "event, %ld tasks after it", e->on->lane.asked - e->ticket);
  trace("wait", text);
  ALIVE();
  if (e->on) {
    if (spoils(e->on)) return failed(cudaErrorStreamCaptureUnsupported);
    drain(e->on, e->ticket);
  }
  return sticky != cudaSuccess ? failed(sticky) : cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
  *ms = (float)(to->time - from->time);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned)
{
  if (spoils(s)) return failed(cudaErrorStreamCaptureUnsupported);
  CUstream_st *on = e->on;
  const long ticket = e->ticket;
  if (!on) return cudaSuccess;
  return push(s, "wait for an event", [=] { drain(on, ticket); });
}

// ------------------------------------------------------------------ graphs

cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode)
{
  ALIVE();
  if (s->capture) return failed(cudaErrorIllegalState);
  s->capture = new recording();
  s->spoiled = false;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *out)
{
  recording *made = s->capture;
  s->capture = nullptr;
  *out = nullptr;
  if (!made) return failed(cudaErrorIllegalState);
  if (!s->spoiled) *out = new CUgraph_st{std::move(*made)};
  delete made;
  return s->spoiled ? failed(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus *status)
{
  *status = !s->capture  ? cudaStreamCaptureStatusNone :
            s->spoiled ? cudaStreamCaptureStatusInvalidated :
                         cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long)
{
  *out = new CUgraphExec_st{graph->tasks};
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { delete graph; return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { delete graph; return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t s)
{
  trace("graph", "");
  const recording *tasks = &graph->tasks;
  return push(s, "graph", [tasks] {
    for (const task &t : *tasks)
      if (sticky == cudaSuccess) t.run();
  });
}

}
