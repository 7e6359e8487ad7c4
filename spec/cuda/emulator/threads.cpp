// Runs the threads of a block on one host thread. Each is a fiber that yields where it waits for
// others, so a kernel behaves the same every time. The order of blocks, warps and lanes can be
// changed (runtime.h), which exposes missing barriers. Owns the fibers and shared memory. Called by
// runtime.cpp and, through emulator.h, by kernels.
#include "runtime.h"
#include "kernel/wgmma.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulator {

thread *now;
block_state block;

// ------------------------------------------------------------------ fibers

enum { STACK = 256 << 10 };

struct fiber {
  fiber *next;
  const void *bottom;   // of its stack
  size_t size;
  void *sanitizer;
#if defined(__x86_64__)
  void *sp;
#else
  ucontext_t context;
#endif
};

static fiber scheduler, *unused_fibers;

#if defined(__x86_64__)
extern "C" void emulator_switch(void **save, void *go_on) __attribute__((visibility("hidden")));
__asm__(".text\n"
        ".globl emulator_switch\n"
        ".hidden emulator_switch\n"
        ".type emulator_switch, @function\n"
        "emulator_switch:\n"
        "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
        "  movq %rsp, (%rdi)\n"
        "  movq %rsi, %rsp\n"
        "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
        "  ret\n"
        ".size emulator_switch, . - emulator_switch\n");
#endif

/// Switches from a fiber to the scheduler or back; returns when `from` runs again.
static void switch_fibers(fiber *from, fiber *to)
{
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from->sanitizer, to->bottom, to->size);
#endif
#if defined(__x86_64__)
  emulator_switch(&from->sp, to->sp);
#else
  swapcontext(&from->context, &to->context);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from->sanitizer, from == &scheduler ? nullptr : &scheduler.bottom,
                                  from == &scheduler ? nullptr : &scheduler.size);
#endif
}

static void give_way(void) { switch_fibers((fiber *)now->stack, &scheduler); }

static const std::function<void()> *body;

enum { READY, AT_WARP, AT_WARPGROUP, AT_BLOCK, AT_WORD, RETURNED };

static void fiber_main(void)
{
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler.bottom, &scheduler.size);
#endif
  for (;;) {   // one thread a round
    (*body)();
    now->state = RETURNED;
    give_way();
  }
}

/// Resets a fiber to its start.
static void fiber_rewind(fiber *f)
{
  // a thread that ended early may have left this closed
  OPEN((char *)f->bottom + 4096, STACK - 4096);
#if defined(__x86_64__)
  void **top = (void **)((char *)f->bottom + STACK);
  *--top = nullptr;   // the return address of fiber_main
  *--top = (void *)fiber_main;
  for (int i = 0; i < 6; i++) *--top = nullptr;
  f->sp = top;
#else
  getcontext(&f->context);
  f->context.uc_stack.ss_sp = (void *)f->bottom;
  f->context.uc_stack.ss_size = STACK;
  f->context.uc_link = nullptr;
  makecontext(&f->context, fiber_main, 0);
#endif
}

static fiber *fiber_take(void)
{
  fiber *f = unused_fibers;
  if (f) {
    unused_fibers = f->next;
    return f;
  }
  void *memory = mmap(nullptr, STACK, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    fprintf(stderr, "emulated card: no memory for the threads of a block\n");
    abort();
  }
  mprotect(memory, 4096, PROT_NONE);
  f = new fiber();
  f->bottom = memory;
  f->size = STACK;
  fiber_rewind(f);
  return f;
}

static void fiber_give(fiber *f)
{
  f->next = unused_fibers;
  unused_fibers = f;
}

// ------------------------------------------------------------------ a block

static thread threads[MOST_THREADS];
static int n_threads;
static const char *kernel;
static bool broken;
static bool running;      // in a thread, not in the scheduler
// thrown when the scheduler completes an exchange for threads that have returned
struct broken_block {};

void fault(const char *format, ...)
{
  va_list args;
  va_start(args, format);
  fprintf(
    stderr,
    "emulated card: %s <<<(%u, %u, %u), (%u, %u, %u)>>>, block (%u, %u, %u), thread (%u, %u, %u): ",
    kernel, block.grid.x, block.grid.y, block.grid.z, block.threads.x, block.threads.y,
    block.threads.z, block.index.x, block.index.y, block.index.z, now->index.x, now->index.y,
    now->index.z);
  vfprintf(stderr, format, args);
  fprintf(stderr, "\n");
  va_end(args);
  broken = true;
  if (!running) throw broken_block();
  give_way();
  abort();   // a broken block never runs again
}

// Per warp, as bits: threads that have not returned, and those waiting for others of their warp or
// warpgroup.
static uint32_t living[MOST_THREADS / WARP], arrived[MOST_THREADS / WARP];

/// Whether all members of an exchange have arrived, in warps `first` to `first + n - 1`; then
/// `kind` runs and releases them.
static bool meet(int first, int n, uint32_t mask, int state, void (*kind)(thread *const *, int))
{
  for (int w = first; w < first + n; w++)
    if (living[w] & mask & ~arrived[w]) return false;
  thread *who[WARPGROUP] = {};
  for (int w = first; w < first + n; w++)
    for (uint32_t left = living[w] & mask; left; left &= left - 1) {
      const int i = w * WARP + __builtin_ctz(left);
      thread *t = &threads[i];
      if (t->state != state || t->kind != kind || t->mask != mask)
        fault("threads of a warp wait for different exchanges (%08x and %08x)", mask, t->mask);
      who[i - first * WARP] = t;
    }
  kind(who, n * WARP);
  for (int w = first; w < first + n; w++) {
    for (uint32_t left = living[w] & mask; left; left &= left - 1)
      threads[w * WARP + __builtin_ctz(left)].state = READY;
    arrived[w] &= ~mask;
  }
  return true;
}

static void wait_for(int warps, int state, uint32_t mask, void (*kind)(thread *const *, int),
                     void *mine)
{
  const int own = now->number / WARP;
  now->state = state;
  now->kind = kind;
  now->mask = mask;
  now->mine = mine;
  arrived[own] |= 1u << lane();
  if (!meet(own / warps * warps, warps, mask, state, kind)) give_way();
}

void meet_warp(uint32_t mask, void (*kind)(thread *const *, int), void *mine)
{
  if (!(mask >> lane() & 1)) fault("the mask %08x of a lane does not contain the lane", mask);
  wait_for(1, AT_WARP, mask, kind, mine);
}

void meet_warpgroup(void (*kind)(thread *const *, int), void *mine)
{ wait_for(WARPGROUP / WARP, AT_WARPGROUP, ~0u, kind, mine); }

static bool votes, voted;

bool meet_block(bool vote)
{
  now->state = AT_BLOCK;
  votes = votes || vote;
  give_way();
  return voted;
}

void wait_while(const uint32_t *word, uint32_t old)
{
  now->state = AT_WORD;
  now->word = word;
  now->old = old;
  give_way();
}

static struct { int count, missing; uint32_t phase; } named[16];

void meet_at(int id, int count)
{
  auto *b = &named[id];
  if (b->missing == 0) b->count = b->missing = count;
  if (b->count != count) fault("barrier %d: %d and %d threads", id, b->count, count);
  if (--b->missing == 0) b->phase++;
  else wait_while(&b->phase, b->phase);
}

/// The order of execution: a permutation of 0..n-1.
static int turn(int i, int n, uint64_t salt)
{
  if (set().order == FORWARDS) return i;
  if (set().order == BACKWARDS) return n - 1 - i;
  // shuffled: an odd step if n is a power of two, otherwise another starting point
  uint64_t step = (salt * 0x9E3779B97F4A7C15u >> 33) % (uint64_t)n;
  if ((n & (n - 1)) == 0) return (int)(((uint64_t)i * (2 * step + 1) + salt) % (uint64_t)n);
  return (int)(((uint64_t)i + step) % (uint64_t)n);
}

static void run_block(size_t shared);

// Copies in flight that a barrier announces. They are made when no thread can go on without them.
static std::vector<std::function<void()>> announced;

/// No thread is ready: either all wait at the barrier, or the kernel is wrong.
static void nobody_ready(void)
{
  int returned = 0, waiting = 0;
  for (int i = 0; i < n_threads; i++) {
    returned += threads[i].state == RETURNED;
    waiting += threads[i].state == AT_BLOCK;
  }
  if (returned + waiting == n_threads) {
    voted = votes;
    votes = false;
    for (int i = 0; i < n_threads; i++)
      if (threads[i].state == AT_BLOCK) threads[i].state = READY;
    return;
  }
  // completes exchanges whose missing members have returned in the meantime
  for (int i = 0; i < n_threads; i++) {
    thread *t = &threads[i];
    const int warps = t->state == AT_WARPGROUP ? WARPGROUP / WARP : 1;
    now = t;
    if ((t->state == AT_WARP || t->state == AT_WARPGROUP) &&
        meet(i / WARP / warps * warps, warps, t->mask, t->state, t->kind))
      return;
  }
  if (!announced.empty()) {
    for (const auto &copy : announced) copy();
    announced.clear();
    return;
  }
  broken = true;
  fprintf(stderr,
          "emulated card: %s, block (%u, %u, %u): deadlock, all threads wait:", kernel,
          block.index.x, block.index.y, block.index.z);
  static const char *const states[] = {"ready", "at a warp's exchange", "at a warpgroup's",
                                       "at __syncthreads", "at a barrier", "returned"};
  for (int i = 0, from = 0; i <= n_threads; i++)
    if (i == n_threads || threads[i].state != threads[from].state) {
      fprintf(stderr, " %d to %d %s;", from, i - 1, states[threads[from].state]);
      from = i;
    }
  fprintf(stderr, "\n");
}

static void run_threads(void)
{
  const int warps = (n_threads + WARP - 1) / WARP;
  for (int left = n_threads; left > 0 && !broken;) {
    bool ran = false;
    for (int i = 0; i < warps && !broken; i++) {
      const int warp = turn(i, warps, block.serial);
      bool again = true;
      while (again && !broken) {   // a warp runs until all its threads wait for others
        again = false;
        for (int j = 0; j < WARP && !broken; j++) {
          const int number = warp * WARP + turn(j, WARP, block.serial);
          if (number >= n_threads) continue;
          if (threads[number].state == AT_WORD && *threads[number].word != threads[number].old)
            threads[number].state = READY;
          if (threads[number].state != READY) continue;
          now = &threads[number];
          if (!now->stack) now->stack = fiber_take();
          running = true;
          switch_fibers(&scheduler, (fiber *)now->stack);
          running = false;
          again = ran = true;
          if (now->state != RETURNED) continue;
          fiber_give((fiber *)now->stack);
          now->stack = nullptr;
          living[warp] &= ~(1u << number % WARP);
          left--;
        }
      }
    }
    try {
      if (!ran && !broken) nobody_ready();
    } catch (const broken_block &) {
    }
  }
  for (int i = 0; i < n_threads; i++) {   // of a broken block
    fiber *f = (fiber *)threads[i].stack;
    if (!f) continue;
    fiber_rewind(f);
    fiber_give(f);
    threads[i].stack = nullptr;
  }
}

bool run_grid(const char *name, dim3 grid, dim3 shape, size_t shared,
              const std::function<void()> &what)
{
  kernel = name;
  body = &what;
  broken = false;
  block.grid = grid;
  block.threads = shape;
  n_threads = (int)(shape.x * shape.y * shape.z);
  const int64_t blocks = (int64_t)grid.x * grid.y * grid.z;
  for (int64_t i = 0; i < blocks && !broken; i++) {
    int64_t at = i;
    if (set().order == BACKWARDS) at = blocks - 1 - i;
    if (set().order == SHUFFLED) at = (i + blocks / 3) % blocks;
    block.index = make_uint3((unsigned)(at % grid.x), (unsigned)(at / grid.x % grid.y),
                             (unsigned)(at / grid.x / grid.y));
    block.serial++;
    run_block(shared);
  }
  return !broken;
}

// ------------------------------------------------------------------ shared memory

enum { WINDOW = 256 << 10, MOST_SHARED = 227 << 10 };
alignas(1024) static unsigned char window[WINDOW];
static size_t window_used, shared_taken;
#if defined(__SANITIZE_ADDRESS__)
enum { BETWEEN = 64 };   // distance between variables
#else
enum { BETWEEN = 0 };
#endif

void *take_shared(size_t bytes, size_t align)
{
  const size_t at = window_used ? (window_used + BETWEEN + align - 1) / align * align : 0;
  shared_taken = (shared_taken + align - 1) / align * align + bytes;
  if (shared_taken > MOST_SHARED || at + bytes > WINDOW)
    fault("more shared memory than a block has: %zu bytes", shared_taken);
  window_used = at + bytes;
  OPEN(window + at, bytes);
  memset(window + at, 0xFF, bytes);
  return window + at;
}

void *dynamic_shared(void) { return window; }

uint32_t shared_offset(const void *p)
{
  if ((const unsigned char *)p < window || (const unsigned char *)p >= window + window_used)
    fault("a shared address outside of shared memory");
  return (uint32_t)((const unsigned char *)p - window);
}

void *shared_at(uint32_t offset, uint32_t bytes)
{
  if (offset + bytes > window_used)
    fault("shared address %u is outside of the block's %zu bytes", offset, window_used);
  return window + offset;
}

// ------------------------------------------------------------------ asynchronous work

void copy_start(void *to, const void *from, uint32_t bytes, bool there)
{
  if ((uintptr_t)to % bytes || (uintptr_t)from % bytes)
    fault("an asynchronous copy of %u bytes that is not aligned to them", bytes);
  shared_offset(to);
  if (now->copies.empty()) now->copies.emplace_back();
  now->copies.back().push_back({to, there ? from : nullptr, bytes});
  memset(to, 0xFF, bytes);   // NaN until the copy is waited for
}

void copy_close(void)
{
  if (now->copies.empty()) now->copies.emplace_back();
  now->copies.emplace_back();
}

/// Completes the closed groups, except the last `left`.
void copy_finish(int left)
{
  while ((int)now->copies.size() - 1 > left) {
    for (const copy_in_flight &c : now->copies.front()) {
      if (c.from) memcpy(c.to, c.from, c.bytes);
      else memset(c.to, 0, c.bytes);
    }
    now->copies.erase(now->copies.begin());
  }
}

/// Starts a copy of `bytes` bytes that the barrier at `address` announces.
static void announce(uint32_t to, uint32_t bytes, uint32_t address, std::function<void()> copy)
{
  auto *b = (barrier *)shared_at(address, 8);
  if (bytes / 16 > b->awaited) fault("a copy of %u bytes that no barrier expects", bytes);
  memset(shared_at(to, bytes), 0xFF, bytes);   // NaN until the copy has been made
  announced.push_back([=] {
    copy();
    b->awaited -= bytes / 16;
    barrier_turn(b);
  });
}

void barrier_turn(barrier *b)
{
  if (b->missing == 0 && b->awaited == 0) *b = {b->count, b->count, 0, b->phase + 1};
}

void copy_box_start(uint32_t to, const box_map *box, const int (&at)[4], uint32_t address)
{
  const box_map map = *box;
  const int64_t first[4] = {at[0], at[1], at[2], at[3]};
  if (to % 1024) fault("shared address %u of a box is not a multiple of 1024", to);
  if (!map.data) fault("a box of an empty tensor");
  announce(to, map.rows * 128, address, [=] {
    uint16_t *numbers = (uint16_t *)shared_at(to, map.rows * 128);
    for (uint32_t r = 0; r < map.rows; r++)
      for (uint32_t c = 0; c < 64; c++) {
        const int64_t place[4] = {first[0] + c, first[1] + r, first[2], first[3]};
        int64_t from = 0;
        bool there = true;
        for (int d = 0; d < 4; d++) {
          there = there && place[d] >= 0 && place[d] < (int64_t)map.size[d];
          from += place[d] * (int64_t)map.stride[d];
        }
        numbers[r * 64 + ((c / 8 ^ r) & 7) * 8 + c % 8] = there ? map.data[from] : 0;
      }
  });
}

void copy_line_start(uint32_t to, const void *from, uint32_t bytes, uint32_t address)
{
  if (to % 16 || (uintptr_t)from % 16 || bytes % 16) fault("a line not aligned to 16 bytes");
  announce(to, bytes, address, [=] { memcpy(shared_at(to, bytes), from, bytes); });
}

struct asked { product what; void (*run)(const product &); };
// The products in flight of each warpgroup, in groups like copies.
static std::vector<std::vector<asked>> products[MOST_THREADS / WARPGROUP];

static std::vector<std::vector<asked>> &own_products(void)
{ return products[now->number / WARPGROUP]; }

void product_start(const product &what, void (*run)(const product &))
{
  if (own_products().empty()) own_products().emplace_back();
  own_products().back().push_back({what, run});
}

void product_close(thread *const *, int)
{
  if (own_products().empty()) own_products().emplace_back();
  own_products().emplace_back();
}

void products_finish(int left)
{
  auto &list = own_products();
  while ((int)list.size() - 1 > left) {
    for (const asked &one : list.front()) one.run(one.what);
    list.erase(list.begin());
  }
}

static void run_block(size_t shared)
{
  window_used = shared_taken = 0;
  CLOSE(window, WINDOW);
  for (int i = 0; i < n_threads; i++) {
    thread *t = &threads[i];
    const unsigned n = (unsigned)i;
    t->index = make_uint3(n % block.threads.x, n / block.threads.x % block.threads.y,
                          n / block.threads.x / block.threads.y);
    t->number = i;
    t->state = READY;
    if (!t->copies.empty()) t->copies.clear();
  }
  for (int w = 0; w < MOST_THREADS / WARP; w++) {
    const int here = n_threads - w * WARP;
    living[w] = here >= WARP ? ~0u : here > 0 ? (1u << here) - 1 : 0;
    arrived[w] = 0;
  }
  for (auto &list : products) list.clear();
  for (auto &b : named) b = {};
  announced.clear();
  now = &threads[0];
  votes = false;
  if (shared > 0) take_shared(shared, 1024);
  run_threads();
  if (!announced.empty() && !broken) {
    fprintf(stderr, "emulated card: %s: a block ended with copies in flight\n", kernel);
    broken = true;
  }
  for (int i = 0; i < n_threads && !broken; i++)
    for (const auto &group : threads[i].copies)
      if (!group.empty()) {
        fprintf(stderr, "emulated card: %s: a thread returned with copies in flight\n", kernel);
        broken = true;
        break;
      }
}

}
