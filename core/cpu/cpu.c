// The CPU device: a table of kernels, filled at first use for the best instruction set that this
// processor and its operating system support. Each kernel file is compiled once per set. Owns the
// table. Called by backend.c, dist/comm_pack.c, this folder and Lua.
//
// ENGINE_ISA=plain|avx2|avx512 in the environment selects a set. An unknown or unsupported set is
// reported and ignored. eng_cpu_isa() changes the set at run time and fills the table again.
#include "device/backend.h"
#include "base/error.h"
#include "gemm.h"

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#define X86 1
#else
#define X86 0
#endif

// Fill the table with the kernels of an instruction set (table.c).
void cpu_fill_plain(backend *b);
void cpu_fill_avx2(backend *b);
void cpu_fill_avx512(backend *b);

// __builtin_cpu_supports checks both the processor (cpuid) and the registers that the system saves
// (xgetbv). In Clang 14 it does not know f16c, so has_avx2 reads that bit from cpuid.
static bool has_plain(void)  { return true; }
#if X86
static bool has_avx2(void)
{
  unsigned a, b, c, d;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
static bool has_avx512(void)
{
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// The instruction sets, best first.
static const struct isa {
  const char *name;
  bool (*here)(void);
  void (*fill)(backend *b);
} isas[] = {
#if X86
  {"avx512", has_avx512, cpu_fill_avx512},
  {"avx2", has_avx2, cpu_fill_avx2},
#endif
  {"plain", has_plain, cpu_fill_plain},
};
enum { ISAS = sizeof isas / sizeof *isas };

static const char *describe(void);
static backend table = {.name = "cpu", .describe = describe};
static const struct isa *in_force;

static void use(const struct isa *isa)
{
  isa->fill(&table);
  in_force = isa;
}

static const struct isa *named(const char *name)
{
  for (int k = 0; k < ISAS; k++)
    if (strcmp(isas[k].name, name) == 0 && isas[k].here()) return &isas[k];
  return NULL;
}

// OpenMP takes any number from OMP_NUM_THREADS and crashes when it starts millions of threads.
static void bound_threads(void)
{
  int asked = omp_get_max_threads();
  if (asked <= ENG_THREADS_MAX) return;
  int cores = omp_get_num_procs();
  omp_set_num_threads(cores < ENG_THREADS_MAX ? cores : ENG_THREADS_MAX);
  fprintf(stderr, "engine: OMP_NUM_THREADS: expected at most %d threads, got %d; using %d\n",
          ENG_THREADS_MAX, asked, omp_get_max_threads());
}

const backend *backend_cpu(void)
{
  if (!in_force) {
    bound_threads();
    const char *wish = getenv("ENGINE_ISA");
    const struct isa *chosen = wish ? named(wish) : NULL;
    for (int k = 0; !chosen; k++)
      if (isas[k].here()) chosen = &isas[k];
    if (wish && *wish && strcmp(wish, chosen->name) != 0)
      fprintf(stderr, "engine: ENGINE_ISA: expected plain, or else avx2 or avx512 on a machine "
                      "that supports it, got '%s'; using %s\n", wish, chosen->name);
    use(chosen);
  }
  return &table;
}

const char *eng_cpu_isa(const char *force)
{
  backend_cpu();
  if (force && strcmp(force, in_force->name) != 0) {
    const struct isa *isa = named(force);
    if (!isa) {
      error_set(ENG_ERR_DEVICE,
                "cpu: expected plain, or else avx2 or avx512 on a machine that supports it, got "
                "'%s'; the best set here is '%s'",
                force, named("avx512") ? "avx512" : named("avx2") ? "avx2" : "plain");
      return NULL;
    }
    use(isa);
  }
  return in_force->name;
}

static const char *describe(void)
{
  static char text[32];
  snprintf(text, sizeof text, "cpu, %s", eng_cpu_isa(NULL));
  return text;
}

static void __attribute__((constructor)) register_devices(void)
{
  backend_register("cpu", backend_cpu);
  backend_register("reference", backend_reference);
}

bool gemm_pairs_here(void)
{
  static int known = -1;
  if (known >= 0) return known;
  known = 0;
#if X86
  const char *wish = getenv("ENGINE_PAIRS");
  if (wish && *wish && strcmp(wish, "on") != 0 && strcmp(wish, "off") != 0)
    fprintf(stderr, "engine: ENGINE_PAIRS: expected on or off, got '%s', which is ignored\n", wish);
  if (!has_avx512() || !__builtin_cpu_supports("avx512bf16")) return false;
  known = wish && strcmp(wish, "on") == 0    ? 1
          : wish && strcmp(wish, "off") == 0 ? 0
                                             : __builtin_cpu_is("amd") != 0;
#endif
  return known;
}

const char *eng_cpu_bf16(void)
{
  bool wide = strcmp(eng_cpu_isa(NULL), "avx512") == 0;
  return gemm_onednn_here() ? "AMX" : wide && gemm_pairs_here() ? "pairs" : "f32";
}

int eng_threads(int n)
{
  backend_cpu();
  if (n > 0) omp_set_num_threads(n < ENG_THREADS_MAX ? n : ENG_THREADS_MAX);
  return omp_get_max_threads();
}
