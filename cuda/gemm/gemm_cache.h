// The algorithms chosen for matrix products: a table in memory, and a text file that keeps the
// choices from run to run, one line per problem. Host logic without CUDA, so spec/cuda/gemm_host.c
// tests it on any machine. Owns the table. Called by gemm_lt.c.
//
// The file is <folder>/cublaslt-<card>-<version>.txt, where <folder> is $ENGINE_CACHE or, if that
// is not set, ~/.cache/engine. A line is
//  choice m=768 n=4096 k=768 .. : rank=1 id=66 tile=20 .. ns=12345
// The file is read once. Every new choice is appended with a single write, so that concurrent
// processes do not corrupt the file. If a problem has two lines, the later line counts. Damaged,
// truncated and unknown lines are skipped. No text of the file reaches cuBLASLt: a choice only
// names one of the algorithms that cuBLASLt's heuristic offers.
#pragma once

#include "gemm_layout.h"

/// A chosen algorithm: its rank in the heuristic's list, cuBLASLt's description of it, and `ns`,
/// the time measured when it was chosen.
#define GEMM_CHOICE_FIELDS(F) \
  F(rank)                     \
  F(id) F(tile) F(stages) F(split_k) F(reduction) F(swizzle) F(custom) F(inner) F(cluster) F(ns)
typedef struct gemm_choice {
#define GEMM_FIELD(name) int64_t name;
  GEMM_CHOICE_FIELDS(GEMM_FIELD)
#undef GEMM_FIELD
} gemm_choice;

/// Whether a and b describe the same algorithm, whatever their ranks and times.
bool gemm_same_algorithm(const gemm_choice *a, const gemm_choice *b);

typedef struct gemm_entry {
  gemm_problem problem;    // the first member: gemm_cache.c compares entries with problems
  gemm_choice  choice;
  bool         chosen;     // `choice` is valid, from the file or from a search
  void        *plan;       // owned by gemm_lt.c; NULL until the first call with this problem
} gemm_entry;

/// Returns the entry of a problem. Creates an empty entry for a new problem. Returns NULL if out of
/// memory. Entries never move.
gemm_entry *gemm_cache_entry(const gemm_problem *problem);

/// Sets the file's path from the environment and reads its choices. A missing or unreadable file is
/// not an error.
void gemm_cache_open(const char *card, int64_t version);
/// Stores an entry's choice in the table and in the file. Returns false if the file could not be
/// written.
bool gemm_cache_keep(gemm_entry *entry, const gemm_choice *choice);
/// Returns the file's path, or "" if no file is used: the search is off, ENGINE_CACHE and HOME are
/// unset, or the path is too long.
const char *gemm_cache_path(void);
/// Clears the table (the caller frees the plans).
void gemm_cache_clear(void);

enum { GEMM_LINE = 2048 };   // bytes, enough for any line
/// Writes "choice m=.. : rank=.. ns=..\n" and returns its length.
int gemm_line_write(char line[GEMM_LINE], const gemm_problem *problem, const gemm_choice *choice);
/// Reads a line. Returns false unless it has exactly the form that gemm_line_write writes.
bool gemm_line_read(const char *line, gemm_problem *problem, gemm_choice *choice);
/// Returns the text "m=768 n=4096 .." of a problem, for messages.
const char *gemm_problem_text(const gemm_problem *problem);
