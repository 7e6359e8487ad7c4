// Which algorithm each matrix product uses: a table in memory, and a text file that pins the choices from run to run, a line a
// problem. Host logic alone, no CUDA in it: spec/cuda/gemm_host.c tests it anywhere. Owns the table. Called by gemm_lt.c.
//
// The file is <folder>/cublaslt-<card>-<version>.txt, <folder> being $ENGINE_CACHE or ~/.cache/engine. A line is
//   choice m=768 n=4096 k=768 .. : rank=1 id=66 tile=20 .. ns=12345
// It is read once, and every new choice is appended with a single write, so that processes at work side by side do not
// disturb each other; of two lines for one problem the later holds. A line that is damaged, cut short or of another kind is
// passed over. Nothing read here reaches cuBLASLt: a choice only names one of the algorithms that its heuristic offers.
#ifndef ENG_CUDA_GEMM_CACHE_H
#define ENG_CUDA_GEMM_CACHE_H

#include "gemm_layout.h"

/// An algorithm by its place in the heuristic's list and by what cuBLASLt tells of it; ns: its time when it was chosen.
#define GEMM_CHOICE_FIELDS(F) \
  F(rank)                     \
  F(id) F(tile) F(stages) F(split_k) F(reduction) F(swizzle) F(custom) F(inner) F(cluster) F(ns)
typedef struct gemm_choice {
#define GEMM_FIELD(name) int64_t name;
  GEMM_CHOICE_FIELDS(GEMM_FIELD)
#undef GEMM_FIELD
} gemm_choice;

/// Whether both describe the same algorithm, wherever it stood in the list.
bool gemm_same_algorithm(const gemm_choice *a, const gemm_choice *b);

typedef struct gemm_entry {
  gemm_problem problem;
  gemm_choice  choice;
  bool         chosen;     // `choice` holds: from the file, or made
  void        *plan;       // gemm_lt.c's; NULL until the problem is met
} gemm_entry;

/// The entry of a problem, made empty when there is none. NULL: no memory. It stays where it is.
gemm_entry *gemm_cache_entry(const gemm_problem *problem);

/// Sets the file's path from the environment and reads the choices in it. No file, or none readable, is fine.
void gemm_cache_open(const char *card, int64_t version);
/// Keeps an entry's choice in the table and in the file. False when the file could not be written.
bool gemm_cache_keep(gemm_entry *entry, const gemm_choice *choice);
/// The file's path; "" when there is no place for one.
const char *gemm_cache_path(void);
/// Forgets everything (plans are the caller's to free).
void gemm_cache_clear(void);

enum { GEMM_LINE = 2048 };   // bytes that a line fits in
/// "choice m=.. : rank=.. ns=..\n"; its length.
int gemm_line_write(char line[GEMM_LINE], const gemm_problem *problem, const gemm_choice *choice);
/// Reads a line; false when anything in it is not as gemm_line_write writes it.
bool gemm_line_read(const char *line, gemm_problem *problem, gemm_choice *choice);
/// "m=768 n=4096 ..", for messages.
const char *gemm_problem_text(const gemm_problem *problem);

#endif
