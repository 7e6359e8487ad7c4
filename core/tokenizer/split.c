// Splitting into words: runs the splitter's steps on a text, each step on every part that the
// previous step made, and encodes the resulting words. Called by tokenizer.c.
#include "tokenizer.h"

// A stretch of the text, and whether the pattern matched it.
typedef struct stretch { int64_t start, end; bool match; } stretch;

typedef struct cursor {
  const step *s;
  const char *text;
  int64_t     size, at, start, end;     // start, end: the next match, if `found`
  bool        found;
} cursor;

static void cursor_find(cursor *c)
{
  const step *s = c->s;
  c->found = pattern_next((int)(s->flags >> 4), s->a, s->a_size, c->text, c->size, c->at, &c->start,
                          &c->end);
}

// Sets *out to the next stretch, which is a match or lies between two matches. Returns false at the
// end of the text. There is no empty stretch between adjacent matches.
static bool cursor_next(cursor *c, stretch *out)
{
  if (c->at >= c->size) return false;
  bool invert = (c->s->flags & 8) != 0;
  if (c->found && c->start == c->at) {
    *out = (stretch){ c->start, c->end, !invert };
    c->at = c->end;
    cursor_find(c);
  } else {
    *out = (stretch){ c->at, c->found ? c->start : c->size, invert };
    c->at = out->end;
  }
  return true;
}

static eng_status emit(eng_tokenizer *t, int from, const char *text, stretch s, bool first)
{
  if (s.end == s.start) return ENG_OK;
  return split_run(t, from, text + s.start, s.end - s.start, first && s.start == 0);
}

static eng_status split(eng_tokenizer *t, int from, const char *text, int64_t size, bool first)
{
  cursor c = { .s = &t->split.list[from - 1], .text = text, .size = size };
  cursor_find(&c);
  int behavior = (int)c.s->flags & 7;
  stretch now, held = { 0, 0, false };       // held: the stretch that is not yet emitted
  bool before = false;                       // whether the previous stretch matched
  while (cursor_next(&c, &now)) {
    bool join = false;                       // `now` extends `held`
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
