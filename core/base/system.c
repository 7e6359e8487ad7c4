// The machine: clock, terminal, versions of libraries, GPU driver. Owns nothing. Called by Lua
// (progress, plots, `engine doctor`) and by the other folders of core/ (clock, GPUs).
#include "engine.h"

#include <dlfcn.h>      // dlopen
#include <dnnl.h>       // dnnl_version
#include <sqlite3.h>    // sqlite3_libversion
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>  // TIOCGWINSZ
#include <time.h>
#include <unistd.h>

double eng_clock(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void eng_sleep(double seconds)
{
  struct timespec time = {(time_t)seconds, (long)(1e9 * (seconds - (double)(time_t)seconds))};
  nanosleep(&time, NULL);
}

bool eng_terminal(int *columns, int *rows, int fd)
{
  struct winsize size = {0};
  if (!isatty(fd)) return false;
  if (ioctl(fd, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) { size.ws_col = 80; size.ws_row = 24; }
  *columns = size.ws_col;
  *rows = size.ws_row;
  return true;
}

static const char *onednn_isa(void)
{
  switch ((int)dnnl_get_effective_cpu_isa()) {
  case dnnl_cpu_isa_sse41: return "SSE4.1";
  case dnnl_cpu_isa_avx: return "AVX";
  case dnnl_cpu_isa_avx2: return "AVX2";
  case dnnl_cpu_isa_avx2_vnni: return "AVX2 with VNNI";
  case dnnl_cpu_isa_avx512_core: return "AVX-512";
  case dnnl_cpu_isa_avx512_core_vnni: return "AVX-512 with VNNI";
  case dnnl_cpu_isa_avx512_core_bf16: return "AVX-512 with BF16";
  case dnnl_cpu_isa_avx512_core_amx: return "AVX-512 with BF16 and AMX";
  default: return "unknown instruction set";
  }
}

const char *eng_library_version(const char *name)
{
  static char text[128];
  if (strcmp(name, "onednn") == 0) {
    const dnnl_version_t *v = dnnl_version();
    snprintf(text, sizeof text, "%d.%d.%d, %s", v->major, v->minor, v->patch, onednn_isa());
    return text;
  }
  if (strcmp(name, "sqlite") == 0) return sqlite3_libversion();
#ifdef _OPENMP
  if (strcmp(name, "openmp") == 0) {
    snprintf(text, sizeof text, "%d", _OPENMP);
    return text;
  }
#endif
  return NULL;
}

// The functions of the CUDA driver API that this file calls; each returns 0 for success.
typedef struct cuda_driver {
  int (*init)(unsigned), (*version)(int *), (*count)(int *), (*device)(int *, int),
    (*name)(char *, int, int);
  int (*memory)(size_t *, int), (*attribute)(int *, int, int);
} cuda_driver;

static bool driver_symbols(cuda_driver *d, void *lib)
{
  const struct { void *slot; const char *symbol; } wanted[] = {
    {&d->init, "cuInit"}, {&d->version, "cuDriverGetVersion"}, {&d->count, "cuDeviceGetCount"},
    {&d->device, "cuDeviceGet"}, {&d->name, "cuDeviceGetName"}, {&d->memory, "cuDeviceTotalMem_v2"},
    {&d->attribute, "cuDeviceGetAttribute"},
  };
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
    void *function = dlsym(lib, wanted[i].symbol);
    if (!function) return false;
    memcpy(wanted[i].slot, &function, sizeof function);
  }
  return true;
}

int eng_gpu_probe(char *text, int size)
{
  enum { CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76 };
  cuda_driver d;
  int version = 0, count = 0, used = 0;
  if (size > 0) text[0] = 0;
  void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!lib || !driver_symbols(&d, lib) || d.init(0) != 0 || d.version(&version) != 0 ||
      d.count(&count) != 0)
    return -1;
  for (int i = 0; i < count && used < size; i++) {
    char name[128] = "?";
    int device, major = 0, minor = 0;
    size_t bytes = 0;
    if (d.device(&device, i) != 0) continue;
    d.name(name, sizeof name, device);
    d.memory(&bytes, device);
    d.attribute(&major, CAPABILITY_MAJOR, device);
    d.attribute(&minor, CAPABILITY_MINOR, device);
    used +=
      snprintf(text + used, (size_t)(size - used),
               "%s%s, %.0f GiB, compute capability %d.%d, driver for CUDA %d.%d", i ? "\n" : "",
               name, (double)bytes / 0x1p30, major, minor, version / 1000, version % 1000 / 10);
  }
  return count;   // the driver stays loaded: unloading it after cuInit is not allowed
}
