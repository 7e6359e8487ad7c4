// Classes of code points, from libutf8proc's categories. Scanners, normalizers and tokenizer.c read
// the table of classes. Called by tokenizer.c.
#include "tokenizer.h"

#include <utf8proc.h>

uint16_t unicode_class[0x110000];

static bool white_space(uint32_t c)
{
  return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

// Letters in circles and squares. They are alphabetic, but in no category of letters.
static bool enclosed(uint32_t c)
{
  return (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) ||
         (c >= 0x1F150 && c <= 0x1F169) || (c >= 0x1F170 && c <= 0x1F189);
}

static uint16_t class_of(uint32_t c)
{
  const char *category = utf8proc_category_string((utf8proc_int32_t)c);    // such as "Lu"
  char kind = category[1];
  uint16_t bits = 0;
  switch (category[0]) {
  case 'L': bits = UC_LETTER | UC_WORD; break;
  case 'N': bits = UC_NUMBER | (kind != 'o' ? UC_WORD : 0); break;
  case 'M': bits = UC_MARK | UC_MARK_NOW | UC_WORD | (kind == 'n' ? UC_NONSPACING : 0); break;
  case 'P': bits = UC_PUNCTUATION | UC_PUNCTUATION_NOW | (kind == 'c' ? UC_WORD : 0); break;
  case 'S': bits = UC_SYMBOL | (c < 0x80 ? UC_PUNCTUATION : 0); break;     // BERT's rule for ASCII
  case 'C': bits = kind == 'n' || kind == 's' ? 0 : UC_CONTROL; break;
  default: break;
  }
  if (white_space(c)) bits |= UC_SPACE;
  if (enclosed(c) || c == 0x200C || c == 0x200D) bits |= UC_WORD;
  return bits;
}

void unicode_start(void)
{
  if (unicode_class['a']) return;
  for (uint32_t c = 0; c < 0x110000; c++) unicode_class[c] = class_of(c);
  for (int i = 0; i < unicode_ranges_count; i++)
    for (uint32_t c = 0; c <= unicode_ranges[i].more; c++)
      unicode_class[unicode_ranges[i].first + c] = unicode_ranges[i].bits;
}
