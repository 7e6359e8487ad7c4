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
  uint16_t bits = 0;
  switch (utf8proc_category((utf8proc_int32_t)c)) {
  case UTF8PROC_CATEGORY_LU: case UTF8PROC_CATEGORY_LL: case UTF8PROC_CATEGORY_LT:
  case UTF8PROC_CATEGORY_LM: case UTF8PROC_CATEGORY_LO: bits = UC_LETTER | UC_WORD; break;
  case UTF8PROC_CATEGORY_ND: case UTF8PROC_CATEGORY_NL: bits = UC_NUMBER | UC_WORD; break;
  case UTF8PROC_CATEGORY_NO: bits = UC_NUMBER; break;
  case UTF8PROC_CATEGORY_MN: bits = UC_MARK | UC_MARK_NOW | UC_NONSPACING | UC_WORD; break;
  case UTF8PROC_CATEGORY_MC: case UTF8PROC_CATEGORY_ME:
    bits = UC_MARK | UC_MARK_NOW | UC_WORD; break;
  case UTF8PROC_CATEGORY_PC: bits = UC_PUNCTUATION | UC_WORD; break;
  case UTF8PROC_CATEGORY_PD: case UTF8PROC_CATEGORY_PS: case UTF8PROC_CATEGORY_PE:
  case UTF8PROC_CATEGORY_PI: case UTF8PROC_CATEGORY_PF: case UTF8PROC_CATEGORY_PO:
    bits = UC_PUNCTUATION; break;
  case UTF8PROC_CATEGORY_SM: case UTF8PROC_CATEGORY_SC: case UTF8PROC_CATEGORY_SK:
  case UTF8PROC_CATEGORY_SO: bits = UC_SYMBOL; break;
  case UTF8PROC_CATEGORY_CC: case UTF8PROC_CATEGORY_CF: case UTF8PROC_CATEGORY_CO:
    bits = UC_CONTROL; break;
  default: break;
  }
  if (bits & UC_PUNCTUATION) bits |= UC_PUNCTUATION_NOW;
  if (c < 0x80 && (bits & UC_SYMBOL)) bits |= UC_PUNCTUATION;      // BERT's rule for ASCII
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
