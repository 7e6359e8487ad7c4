// Arenas: bump allocation in chunks, with one list of freed pieces for each exact size. See
// arena.h. The host's chunks come from mmap. In another memory space, the arena gets its chunks
// from the device through arena_source. If arena_source has a function `mark`, the arena reports
// allocated and freed pieces to it. This file never reads a piece, because the host may have no
// access to it. Called by this folder, device/, params/, autograd/, fp8/, dist/, kernels and Lua.
//
//   chunk 0 [#### used ####|      free      ]   chunk 1 [...]
//                          ^ bump
// A request first looks for a freed piece of its size, then for space behind the bump position of a
// chunk, and then takes another chunk from the system. Empty chunks stay for later requests and
// return to the system only when memory is short. In the lasting arenas (all but step and scratch)
// a chunk that holds one large piece returns to the system as soon as that piece is freed.
#include "arena.h"

#include "base/array.h"
#include "base/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// Under AddressSanitizer, free memory is poisoned and gaps separate the pieces. So the sanitizer
// catches a kernel that writes outside its tensors, although all memory comes in large chunks.
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define CLOSE(memory, bytes) __asan_poison_memory_region(memory, (size_t)(bytes))
#define OPEN(memory, bytes)  __asan_unpoison_memory_region(memory, (size_t)(bytes))
enum { APART = 1 };      // gap after each piece, in units of the space's alignment
#else
#define CLOSE(memory, bytes) ((void)(memory), (void)(bytes))
#define OPEN(memory, bytes)  ((void)(memory), (void)(bytes))
enum { APART = 0 };
#endif

enum { ALIGNMENT = 64, CARD_ALIGNMENT = 256, FIRST_LISTS = 1024 /* a power of two */ };

typedef struct chunk {
  struct chunk *next;
  char   *memory;
  int64_t size, used;      // bytes; used: the bump position
  bool    dedicated;       // holds exactly one piece
} chunk;

// The freed pieces of one size; the piece freed last is reused first.
typedef struct free_list {
  int64_t size;            // of each piece; 0: the entry is empty
  int64_t n, room;
  void  **piece;           // [n]
} free_list;

typedef struct arena {
  const char *name;
  int64_t chunk_size;      // usual size of a new chunk, in bytes
  chunk  *first, *current;
  free_list *lists;        // [n_lists] a hash table by size
  int     n_lists;         // 0 or a power of two
  int     lists_used;      // entries of lists[] in use
  int64_t used, peak, reserved, allocations, pieces;
} arena;

#define ARENAS_OF(prefix) { \
  [ARENA_PARAMETER] = {.name = prefix "parameters", .chunk_size = 1 << 20}, \
  [ARENA_GRADIENT]  = {.name = prefix "gradients",  .chunk_size = 1 << 20}, \
  [ARENA_OPTIMIZER] = {.name = prefix "optimizer",  .chunk_size = 1 << 20}, \
  [ARENA_MESSAGE]   = {.name = prefix "messages",   .chunk_size = 1 << 20}, \
  [ARENA_KEPT]      = {.name = prefix "kept",       .chunk_size = 4 << 20}, \
  [ARENA_STEP]      = {.name = prefix "step",       .chunk_size = 64 << 20}, \
  [ARENA_SCRATCH]   = {.name = prefix "scratch",    .chunk_size = 8 << 20}, \
}
static arena arenas[SPACE_COUNT][ARENA_COUNT] = {[SPACE_HOST] = ARENAS_OF(""),
                                                 [SPACE_CUDA] = ARENAS_OF("cuda ")};
static arena_source sources[SPACE_COUNT];
static int in_force = SPACE_HOST;
static int pinned[SPACE_COUNT];
static int64_t limit;      // the most bytes of all arenas of a space together; 0: no limit

void arena_register(int space, const arena_source *source) { sources[space] = *source; }

void arena_use(int space) { in_force = space; }

int arena_space(void) { return in_force; }

void arena_pin(int space, int by) { pinned[space] += by; }

static bool lasting(arena_id id) { return id != ARENA_STEP && id != ARENA_SCRATCH; }

static int64_t rounded(int space, int64_t bytes)
{
  int64_t unit = space == SPACE_HOST ? ALIGNMENT : CARD_ALIGNMENT;
  return ((bytes <= 0 ? 1 : (bytes + unit - 1) / unit) + APART) * unit;
}

/// Returns the list for `size` or, if there is none, the empty entry for it. Returns NULL if the
/// table is full.
static free_list *list_for(const arena *a, int64_t size)
{
  uint64_t start = (uint64_t)(size / ALIGNMENT) * 0x9E3779B97F4A7C15ull >> 32;
  for (int i = 0; i < a->n_lists; i++) {
    free_list *list = &a->lists[(start + (uint64_t)i) & (uint64_t)(a->n_lists - 1)];
    if (list->size == size || list->size == 0) return list;
  }
  return NULL;
}

/// Doubles the table of lists. Leaves the table unchanged if there is no memory.
static void lists_grow(arena *a)
{
  arena more = {.n_lists = a->n_lists ? 2 * a->n_lists : FIRST_LISTS};
  more.lists = calloc((size_t)more.n_lists, sizeof *more.lists);
  if (!more.lists) return;
  for (int i = 0; i < a->n_lists; i++)
    if (a->lists[i].size) *list_for(&more, a->lists[i].size) = a->lists[i];
  free(a->lists);
  a->lists = more.lists;
  a->n_lists = more.n_lists;
}

/// Returns the size in bytes that a file in /sys holds as text, or `otherwise` if the file holds no
/// number above 0.
static int64_t number_in(const char *path, int64_t otherwise)
{
  FILE *file = fopen(path, "r");
  long long value;
  if (!file) return otherwise;
  if (fscanf(file, "%lld", &value) != 1 || value <= 0) value = otherwise;
  fclose(file);
  return value;
}

/// Returns how many bytes of memory the machine has, or the limit of the process's container if
/// that is lower. If a process exceeds this number, the system kills the process instead of
/// refusing memory.
static int64_t machine_memory(void)
{
  static int64_t known;
  if (known) return known;
  int64_t all = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
  if (all <= 0) all = INT64_MAX;
  int64_t group = number_in("/sys/fs/cgroup/memory.max",
                            number_in("/sys/fs/cgroup/memory/memory.limit_in_bytes", all));
  known = group < all ? group : all;
  return known;
}

static int64_t memory_of(int space)
{ return space == SPACE_HOST ? machine_memory() : sources[space].capacity(); }

/// Reports to AddressSanitizer, or to the emulated card, that memory is in use (`out`) or free. The
/// memory of a captured step counts as in use while the captured step exists.
static void mark(int space, arena_id id, void *memory, int64_t bytes, bool out)
{
  if (space != SPACE_HOST) {
    if (sources[space].mark && bytes > 0 && (out || lasting(id) || pinned[space] == 0))
      sources[space].mark(memory, bytes, out);
  } else if (out) OPEN(memory, bytes);
  else CLOSE(memory, bytes);
}

static int64_t reserved_in_all(int space)
{
  int64_t total = 0;
  for (int i = 0; i < ARENA_COUNT; i++) total += arenas[space][i].reserved;
  return total;
}

static void *memory_take(int space, int64_t size)
{
  if (space != SPACE_HOST) return sources[space].take(size);
  void *memory =
    mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return NULL;
  if (size >= 4 << 20) madvise(memory, (size_t)size, MADV_HUGEPAGE);
  return memory;
}

static void memory_give(int space, void *memory, int64_t size)
{
  if (space != SPACE_HOST) sources[space].give(memory, size);
  else munmap(memory, (size_t)size);
}

static void chunk_return(int space, arena *a, chunk **at)
{
  chunk *c = *at;
  *at = c->next;
  if (a->current == c) a->current = a->first;
  if (space == SPACE_HOST) OPEN(c->memory, c->size);   // another mapping may get these addresses
  memory_give(space, c->memory, c->size);
  a->reserved -= c->size;
  free(c);
}

/// Returns empty chunks to the system: an earlier, larger step may have left some.
static void return_empty_chunks(int space)
{
  for (int i = 0; i < ARENA_COUNT; i++)
    for (chunk **at = &arenas[space][i].first; *at;) {
      if ((*at)->used == 0 && (lasting((arena_id)i) || pinned[space] == 0))
        chunk_return(space, &arenas[space][i], at);
      else at = &(*at)->next;
    }
}

static void complain(int space, const arena *wanting, int64_t bytes)
{
  const arena *all = arenas[space];
  char table[768];
  int at = 0;
  for (int i = 0; i < ARENA_COUNT && at < (int)sizeof table; i++)
    at += snprintf(table + at, sizeof table - (size_t)at,
                   "\n  %-15s %10.1f MiB in use, %10.1f MiB reserved", all[i].name,
                   (double)all[i].used / (1 << 20), (double)all[i].reserved / (1 << 20));
  char bound[64] = "";
  if (limit) snprintf(bound, sizeof bound, " (memory limit: %.1f MiB)", (double)limit / (1 << 20));
  else
    snprintf(bound, sizeof bound, " (%s has %.1f MiB in all)",
             space == SPACE_HOST ? "this machine" : "the card",
             (double)memory_of(space) / (1 << 20));
  error_set(
    ENG_ERR_MEMORY,
    "out of memory: the %s arena needs %.1f MiB more%s:%s\n  hint: use a smaller batch or context, "
    "accumulate=N (N smaller micro-batches), precision=bf16, or engine.scope() around evaluation",
    wanting->name, (double)bytes / (1 << 20), bound, table);
}

static chunk *chunk_new(int space, arena_id id, int64_t bytes)
{
  arena *a = &arenas[space][id];
  bool dedicated = lasting(id) && bytes >= a->chunk_size / 2;
  int64_t size = dedicated || bytes > a->chunk_size ? bytes : a->chunk_size;
  int64_t most = memory_of(space), whole;
  if (limit && limit < most) most = limit;
  void *memory = NULL;
  for (int attempt = 1; attempt <= 3 && !memory; attempt++) {
    if (attempt == 2) size = bytes;   // a smaller chunk may still fit
    if (attempt == 3) return_empty_chunks(space);
    whole = (size + 4095) / 4096 * 4096;
    if (reserved_in_all(space) <= most - size) memory = memory_take(space, whole);
  }
  chunk *c = memory ? malloc(sizeof *c) : NULL;
  if (!c) {
    if (memory) memory_give(space, memory, whole);
    complain(space, a, bytes);
    return NULL;
  }
  mark(space, id, memory, whole, false);
  *c = (chunk){.memory = memory, .size = whole, .dedicated = dedicated};
  a->reserved += whole;
  a->allocations++;
  return c;
}

void *arena_alloc_in(int space, arena_id id, int64_t bytes)
{
  arena *a = &arenas[space][id];
  if (bytes < 0 || bytes > INT64_MAX / 2) {   // the caller's size computation may have overflowed
    complain(space, a, INT64_MAX);
    return NULL;
  }
  int64_t size = rounded(space, bytes);
  void *piece = NULL;
  free_list *list = list_for(a, size);
  if (list && list->size == size && list->n > 0) piece = list->piece[--list->n];
  else {
    chunk *c = a->current;
    while (c && (c->dedicated || c->size - c->used < size)) c = c->next;
    if (!c) {
      c = chunk_new(space, id, size);
      if (!c) return NULL;
      // Appends the chunk, so that after every reset the chunks are used in the order of creation.
      chunk **end = &a->first;
      while (*end) end = &(*end)->next;
      *end = c;
    }
    if (!c->dedicated) a->current = c;
    piece = c->memory + c->used;
    c->used += size;
  }
  mark(space, id, piece, bytes, true);
  a->used += size;
  a->pieces++;
  if (a->used > a->peak) a->peak = a->used;
  return piece;
}

static void rewind_chunks(int space, arena_id id)
{
  arena *a = &arenas[space][id];
  for (int i = 0; a->lists_used > 0 && i < a->n_lists; i++) {
    free(a->lists[i].piece);
    if (a->lists[i].size) a->lists_used--;
    a->lists[i] = (free_list){0};
  }
  for (chunk *c = a->first; c; c = c->next) {
    mark(space, id, c->memory, c->used, false);
    c->used = 0;
  }
  a->current = a->first;
  a->used = a->pieces = 0;
}

void arena_free_in(int space, arena_id id, void *piece, int64_t bytes)
{
  if (!piece) return;
  arena *a = &arenas[space][id];
  int64_t size = rounded(space, bytes);
  a->used -= size;
  if (--a->pieces == 0 && !lasting(id)) {
    rewind_chunks(space, id);
    return;
  }
  if (lasting(id) && size >= a->chunk_size / 2) {
    for (chunk **at = &a->first; *at; at = &(*at)->next) {
      if ((*at)->memory != piece || !(*at)->dedicated) continue;
      chunk_return(space, a, at);
      return;
    }
  }
  mark(space, id, piece, size, false);
  if (2 * a->lists_used >= a->n_lists) lists_grow(a);
  free_list *list = list_for(a, size);
  // without memory for the list, the piece stays unused until the arena is reset; lasting arenas
  // are never reset
  if (!list || !ARRAY_GROW(list->piece, list->room, list->n + 1)) return;
  if (list->size == 0) a->lists_used++;
  list->size = size;
  list->piece[list->n++] = piece;
}

void arena_pages_give(arena_id id, void *pages, int64_t bytes)
{
  madvise(pages, (size_t)bytes, MADV_NOHUGEPAGE);   // else a huge page could fill the gap again
  madvise(pages, (size_t)bytes, MADV_DONTNEED);
  CLOSE(pages, bytes);
  arenas[SPACE_HOST][id].used -= bytes;
}

void arena_pages_take(arena_id id, void *pages, int64_t bytes)
{
  arena *a = &arenas[SPACE_HOST][id];
  OPEN(pages, bytes);
  a->used += bytes;
  if (a->used > a->peak) a->peak = a->used;
}

int eng_memory(eng_memory_row *rows, int capacity)
{
  int n = 0;
  for (int space = 0; space < SPACE_COUNT; space++)
    for (int i = 0; i < ARENA_COUNT && n < capacity; i++) {
      const arena *a = &arenas[space][i];
      if (space != SPACE_HOST && a->allocations == 0) continue;   // never used
      rows[n++] = (eng_memory_row){a->name, a->used, a->peak, a->reserved, a->allocations};
    }
  return n;
}

void eng_memory_limit(int64_t bytes) { limit = bytes > 0 ? bytes : 0; }
