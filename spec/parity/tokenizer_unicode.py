"""Prints the table of core/tokenizer/unicode_versions.c: classes of the code points for which the
package `tokenizers`, whose parts use Unicode 8 to 17, and libutf8proc 2.8 (Unicode 15) differ.
Takes three minutes."""
import ctypes
import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"
from tokenizers import Regex, normalizers, pre_tokenizers

LIBRARY = ctypes.CDLL("libutf8proc.so.2")
FREE = ctypes.CDLL(None).free
FREE.argtypes = [ctypes.c_void_p]
NAMES = ("Cn Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Cs "
         "Co").split()
CODES = [c for c in range(0x110000) if not 0xd800 <= c < 0xe000]
KIND = {c: NAMES[LIBRARY.utf8proc_category(c)] for c in CODES}
LETTER, NUMBER, SPACE, PUNCTUATION, MARK, NONSPACING, CONTROL, WORD, SYMBOL = (1 << i
                                                                              for i in range(9))
PUNCTUATION_NOW, MARK_NOW, INERT = 512, 1024, 2048


def members(expression):
    """Code points that match an expression for one character."""
    split, found = pre_tokenizers.Split(Regex(expression), "removed"), set()
    for base in range(0, len(CODES), 4096):
        chunk = CODES[base:base + 4096]
        left = set()
        for _, (a, b) in split.pre_tokenize_str("".join(map(chr, chunk))):
            left.update(chunk[a:b])
        found.update(set(chunk) - left)
    return found


def by_test(test):
    return {c for c in CODES if test(chr(c))}


def kinds(test):
    return {c for c in CODES if test(KIND[c])}


def normalized(name, text):
    call = getattr(LIBRARY, "utf8proc_" + name)
    call.restype, call.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    pointer = call(text.encode())
    value = ctypes.string_at(pointer).decode()
    FREE(pointer)
    return value


def inert():
    """Code points that the package leaves alone and libutf8proc reorders or decomposes."""
    found = {0x11930}                                   # the second half of U+11938
    for name in ("NFD", "NFKD"):
        theirs = getattr(normalizers, name)()
        for c in CODES[1:]:
            for text in (chr(c), "a\u0345" + chr(c), "a" + chr(c) + "\u0334"):
                if KIND[c] != "Co" and theirs.normalize_str(text) != normalized(name, text):
                    found.add(c)
    return found


def main():
    punctuation, words = pre_tokenizers.Punctuation(), pre_tokenizers.Whitespace()
    clean = normalizers.BertNormalizer(True, False, False, False)
    strip = normalizers.BertNormalizer(False, False, True, False)
    accents = normalizers.StripAccents()
    spaces = members(r"\s")
    circled = {c for a, b in ((0x24B6, 0x24E9), (0x1F130, 0x1F149), (0x1F150, 0x1F169),
                              (0x1F170, 0x1F189)) for c in range(a, b + 1)}
    ours_words = kinds(lambda k: k[0] in "LM" or k in ("Nd", "Nl", "Pc")) | circled | {0x200c,
                                                                                       0x200d}
    sets = [
        (LETTER, members(r"\p{L}"), kinds(lambda k: k[0] == "L")),
        (NUMBER, members(r"\p{N}"), kinds(lambda k: k[0] == "N")),
        (SPACE, spaces, spaces),
        (PUNCTUATION, by_test(lambda t: len(punctuation.pre_tokenize_str("x" + t)) == 2),
         {c for c in CODES if KIND[c][0] == "P" or c < 128 and KIND[c][0] == "S"}),
        (MARK, by_test(lambda t: accents.normalize_str("x" + t) == "x"),
         kinds(lambda k: k[0] == "M")),
        (NONSPACING, by_test(lambda t: strip.normalize_str("x" + t) == "x"),
         kinds(lambda k: k == "Mn")),
        (CONTROL, by_test(lambda t: clean.normalize_str("x" + t) == "x" and t not in "\0\ufffd") |
         {9, 10, 13}, kinds(lambda k: k in ("Cc", "Cf", "Co")) - {0}),
        (WORD, by_test(lambda t: [p for p, _ in words.pre_tokenize_str("x" + t)] == ["x" + t]),
         ours_words),
        (SYMBOL, members(r"\p{S}"), kinds(lambda k: k[0] == "S")),
        (PUNCTUATION_NOW, members(r"\p{P}"), kinds(lambda k: k[0] == "P")),
        (MARK_NOW, members(r"\p{M}"), kinds(lambda k: k[0] == "M")),
        (INERT, inert(), set()),
    ]
    theirs = {c: sum(bit for bit, want, _ in sets if c in want) for c in CODES}
    ours = {c: sum(bit for bit, _, have in sets if c in have) for c in CODES}
    rows = []
    for c in CODES:
        if theirs[c] == ours[c]:
            continue
        if rows and rows[-1][1] == c - 1 and rows[-1][2] == theirs[c]:
            rows[-1][1] = c
        else:
            rows.append([c, c, theirs[c]])
    line = " "
    for first, last, bits in rows:
        cell = " { 0x%X, %d, %d }," % (first, last - first, bits)
        if len(line) + len(cell) > 100:
            print(line)
            line = " "
        line += cell
    print(line)


main()
