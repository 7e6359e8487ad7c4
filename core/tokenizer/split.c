// Splitting into words: runs the splitter's steps on a text, each step on every part that the
// previous step made, and encodes the resulting words. Called by tokenizer.c.
#include "tokenizer.h"

// A stretch of the text: a match, or the text between two matches.
typedef struct stretch { int64_t start, end; bool match; } stretch;

static eng_status emit(eng_tokenizer *t, int from, const char *text, stretch s, bool first)
{ return split_run(t, from, text + s.start, s.end - s.start, first && s.start == 0); }

static eng_status split(eng_tokenizer *t, int from, const char *text, int64_t size, bool first)
{
  const step *s = &t->split.list[from - 1];
  int behavior = (int)s->flags & 7;
  bool invert = (s->flags & 8) != 0, before = false;   // before: the previous stretch matched
  int64_t start = 0, end = 0;                          // the pattern's match at or after `at`
  stretch now, held = { 0, 0, false };                 // held: the stretch that is not yet emitted
  for (int64_t at = 0; at < size; at = now.end) {
    if (at == end && !pattern_next((int)(s->flags >> 4), s->a, s->a_size, text, size, at, &start,
                                   &end))
      start = end = size;
    // there is no empty stretch between adjacent matches
    now = start > at ? (stretch){ at, start, invert } : (stretch){ at, end, !invert };
    bool join = false;                                 // `now` extends `held`
    switch (behavior) {
    case ENG_SPLIT_REMOVED:
      if (now.match) now.start = now.end;
      break;
    case ENG_SPLIT_CONTIGUOUS: join = now.match == before; break;
    case ENG_SPLIT_WITH_PREVIOUS: join = now.match && !before; break;
    // a match joins the unmatched stretch that follows it
    case ENG_SPLIT_WITH_NEXT: join = before && !now.match; break;
    default: break;
    }
    before = now.match && behavior != ENG_SPLIT_REMOVED;
    if (join) {
      held.end = now.end;
      continue;
    }
    ENG_TRY(emit(t, from, text, held, first));
    held = now;
  }
  return emit(t, from, text, held, first);
}

eng_status split_run(eng_tokenizer *t, int from, const char *text, int64_t size, bool first)
{
  for (; from < t->split.n; from++) {
    step *s = &t->split.list[from];
    if (size == 0) return ENG_OK;
    if (s->kind == ENG_STEP_SPLIT) return split(t, from + 1, text, size, first);
    if (s->kind == ENG_STEP_PREPEND && s->flags == 2 && !first) continue;
    if (s->kind == ENG_STEP_BYTES && t->byte_mode && from == t->split.n - 1) break;
    ENG_TRY(step_run(s, &text, &size));
  }
  if (size == 0) return ENG_OK;
  return word_encode(t, text, size);
}
