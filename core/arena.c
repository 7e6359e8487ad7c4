// Arenas: bump allocation in chunks from mmap, with free lists by exact size. See arena.h.
//
//   chunk 0 [#### used ####|      free      ]   chunk 1 [...]
//                          ^ bump
// A request first looks for a returned piece of its size, then bumps, then takes another chunk.
// Chunks of the step and scratch arenas stay until the process ends; in the lasting arenas a chunk
// that served one large request alone goes back to the system when that piece is freed.
#include "arena.h"

#include "error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// Under AddressSanitizer whatever is not handed out is poisoned, and pieces stand apart, so that a kernel
// that leaves its tensors is caught although all memory comes in big chunks.
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define CLOSE(memory, bytes) __asan_poison_memory_region(memory, (size_t)(bytes))
#define OPEN(memory, bytes)  __asan_unpoison_memory_region(memory, (size_t)(bytes))
enum { APART = 64 };
#else
#define CLOSE(memory, bytes) ((void)(memory))
#define OPEN(memory, bytes)  ((void)(memory))
enum { APART = 0 };
#endif

enum { ALIGNMENT = 64, FREE_LISTS = 1024 /* a power of two */ };

typedef struct chunk {
  struct chunk *next;
  char   *memory;
  int64_t size, used;      // bytes; used: where the bump stands
  bool    dedicated;       // holds exactly one piece
} chunk;

// Returned pieces of one size, linked through their own first bytes.
typedef struct free_list {
  int64_t size;            // 0: the entry is empty
  void   *first;
} free_list;

typedef struct arena {
  const char *name;
  int64_t chunk_size;      // bytes taken from the system at least
  chunk  *first, *current;
  free_list lists[FREE_LISTS];
  int64_t used, peak, reserved, allocations, pieces;
} arena;

static arena arenas[ARENA_COUNT] = {
  [ARENA_PARAMETER] = {.name = "parameters", .chunk_size = 1 << 20},
  [ARENA_OPTIMIZER] = {.name = "optimizer",  .chunk_size = 1 << 20},
  [ARENA_KEPT]      = {.name = "kept",       .chunk_size = 4 << 20},
  [ARENA_STEP]      = {.name = "step",       .chunk_size = 64 << 20},
  [ARENA_SCRATCH]   = {.name = "scratch",    .chunk_size = 8 << 20},
};
static int64_t limit;      // bytes over all arenas; 0: none

static bool lasting(arena_id id)
{
  return id == ARENA_PARAMETER || id == ARENA_OPTIMIZER || id == ARENA_KEPT;
}

static int64_t rounded(int64_t bytes)
{
  return (bytes <= 0 ? ALIGNMENT : (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT) + APART;
}

/// The list for `size`, or the empty entry where it would go; NULL when the table is full.
static free_list *list_for(arena *a, int64_t size)
{
  uint64_t start = (uint64_t)(size / ALIGNMENT) * 0x9E3779B97F4A7C15ull >> 54;
  for (int i = 0; i < FREE_LISTS; i++) {
    free_list *list = &a->lists[(start + (uint64_t)i) & (FREE_LISTS - 1)];
    if (list->size == size || list->size == 0) return list;
  }
  return NULL;
}

/// A number of bytes in a file of the kernel's; `otherwise` when there is none.
static int64_t number_in(const char *path, int64_t otherwise)
{
  FILE *file = fopen(path, "r");
  long long value;
  if (!file) return otherwise;
  if (fscanf(file, "%lld", &value) != 1 || value <= 0) value = otherwise;
  fclose(file);
  return value;
}

/// Memory of the machine, or what its container may use. Beyond it the system would not refuse: it kills.
static int64_t machine_memory(void)
{
  static int64_t known;
  if (known) return known;
  int64_t all = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
  if (all <= 0) all = INT64_MAX;
  int64_t group = number_in("/sys/fs/cgroup/memory.max", number_in("/sys/fs/cgroup/memory/memory.limit_in_bytes", all));
  known = group < all ? group : all;
  return known;
}

static int64_t reserved_in_all(void)
{
  int64_t total = 0;
  for (int i = 0; i < ARENA_COUNT; i++) total += arenas[i].reserved;
  return total;
}

static void chunk_return(arena *a, chunk **at)
{
  chunk *c = *at;
  *at = c->next;
  if (a->current == c) a->current = a->first;
  OPEN(c->memory, c->size);   // another mapping may take the place
  munmap(c->memory, (size_t)c->size);
  a->reserved -= c->size;
  free(c);
}

/// Returns chunks that hold nothing to the system: what an earlier, larger step took.
static void return_empty_chunks(void)
{
  for (int i = 0; i < ARENA_COUNT; i++)
    for (chunk **at = &arenas[i].first; *at;) {
      if ((*at)->used == 0) chunk_return(&arenas[i], at);
      else at = &(*at)->next;
    }
}

static void complain(const arena *wanting, int64_t bytes)
{
  char table[768];
  int at = 0;
  for (int i = 0; i < ARENA_COUNT && at < (int)sizeof table; i++)
    at += snprintf(table + at, sizeof table - (size_t)at, "\n  %-10s %10.1f MiB in use, %10.1f MiB reserved",
                   arenas[i].name, (double)arenas[i].used / (1 << 20), (double)arenas[i].reserved / (1 << 20));
  char bound[64] = "";
  if (limit) snprintf(bound, sizeof bound, " (limit %.1f MiB)", (double)limit / (1 << 20));
  else snprintf(bound, sizeof bound, " (this machine has %.1f MiB)", (double)machine_memory() / (1 << 20));
  error_set(ENG_ERR_MEMORY, "out of memory: the %s arena needs %.1f MiB more%s:%s\n  hint: a smaller batch or context, "
            "accumulate=N micro-batches, precision=bf16, or engine.scope() around evaluation",
            wanting->name, (double)bytes / (1 << 20), bound, table);
}

static chunk *chunk_new(arena_id id, int64_t bytes)
{
  arena *a = &arenas[id];
  bool dedicated = lasting(id) && bytes >= a->chunk_size / 2;
  int64_t size = dedicated || bytes > a->chunk_size ? bytes : a->chunk_size;
  int64_t most = limit && limit < machine_memory() ? limit : machine_memory();
  if (reserved_in_all() > most - size) size = bytes;   // a smaller chunk may still do
  if (reserved_in_all() > most - size) return_empty_chunks();
  if (reserved_in_all() > most - size) {
    complain(a, bytes);
    return NULL;
  }
  size = (size + 4095) / 4096 * 4096;
  void *memory = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  chunk *c = memory == MAP_FAILED ? NULL : malloc(sizeof *c);
  if (!c) {
    if (memory != MAP_FAILED) munmap(memory, (size_t)size);
    complain(a, bytes);
    return NULL;
  }
  if (size >= 4 << 20) madvise(memory, (size_t)size, MADV_HUGEPAGE);
  CLOSE(memory, size);
  *c = (chunk){.memory = memory, .size = size, .dedicated = dedicated};
  a->reserved += size;
  a->allocations++;
  return c;
}

void *arena_alloc(arena_id id, int64_t bytes)
{
  arena *a = &arenas[id];
  if (bytes < 0 || bytes > INT64_MAX / 2) {   // the sizes of an absurd request may have wrapped
    complain(a, INT64_MAX);
    return NULL;
  }
  int64_t size = rounded(bytes);
  void *piece = NULL;
  free_list *list = list_for(a, size);
  if (list && list->size == size && list->first) {
    piece = list->first;
    OPEN(piece, sizeof list->first);
    memcpy(&list->first, piece, sizeof list->first);
  } else {
    chunk *c = a->current;
    while (c && (c->dedicated || c->size - c->used < size)) c = c->next;
    if (!c) {
      c = chunk_new(id, size);
      if (!c) return NULL;
      // Appended, so that a reset replays the same order of chunks.
      chunk **end = &a->first;
      while (*end) end = &(*end)->next;
      *end = c;
    }
    if (!c->dedicated) a->current = c;
    piece = c->memory + c->used;
    c->used += size;
  }
  OPEN(piece, bytes);
  a->used += size;
  a->pieces++;
  if (a->used > a->peak) a->peak = a->used;
  return piece;
}

static void rewind_chunks(arena *a)
{
  memset(a->lists, 0, sizeof a->lists);
  for (chunk *c = a->first; c; c = c->next) {
    CLOSE(c->memory, c->used);
    c->used = 0;
  }
  a->current = a->first;
  a->used = a->pieces = 0;
}

void arena_free(arena_id id, void *piece, int64_t bytes)
{
  if (!piece) return;
  arena *a = &arenas[id];
  int64_t size = rounded(bytes);
  a->used -= size;
  if (--a->pieces == 0 && !lasting(id)) {
    rewind_chunks(a);
    return;
  }
  if (lasting(id) && size >= a->chunk_size / 2) {
    for (chunk **at = &a->first; *at; at = &(*at)->next) {
      if ((*at)->memory != piece || !(*at)->dedicated) continue;
      chunk_return(a, at);
      return;
    }
  }
  free_list *list = list_for(a, size);
  if (!list) {   // more sizes than lists: the piece waits for the reset
    CLOSE(piece, size);
    return;
  }
  OPEN(piece, sizeof list->first);
  memcpy(piece, &list->first, sizeof list->first);
  CLOSE(piece, size);
  list->size = size;
  list->first = piece;
}

void arena_reset(arena_id id)
{
  rewind_chunks(&arenas[id]);
}

int eng_memory(eng_memory_row *rows, int capacity)
{
  for (int i = 0; i < ARENA_COUNT && i < capacity; i++)
    rows[i] = (eng_memory_row){arenas[i].name, arenas[i].used, arenas[i].peak, arenas[i].reserved, arenas[i].allocations};
  return ARENA_COUNT < capacity ? ARENA_COUNT : capacity;
}

void eng_memory_limit(int64_t bytes)
{
  limit = bytes > 0 ? bytes : 0;
}
