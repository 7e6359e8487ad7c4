// Part of engine.h; only engine.h includes this file. Tokenizers: text to numbers and back.

/// A tokenizer, as Hugging Face's tokenizer.json describes it. lua/engine/data/tokenizer.lua reads
/// that file and builds the tokenizer. It calls the functions from eng_tokenizer_new to
/// eng_tokenizer_ready in the order in which they are declared here. Encoding and decoding before
/// eng_tokenizer_ready, and building calls after it, are errors (STATE). One thread at a time may
/// use a tokenizer.
typedef struct eng_tokenizer eng_tokenizer;
/// The model: byte-pair encoding, unigram (the most probable pieces), WordPiece (the longest
/// pieces from the left), or whole words.
enum { ENG_TOKENS_BPE = 0, ENG_TOKENS_UNIGRAM = 1, ENG_TOKENS_WORDPIECE = 2, ENG_TOKENS_WORDS = 3 };
/// Flags of a model. BYTE_FALLBACK (BPE, unigram): an unknown character becomes tokens such as
/// <0xE2>, if the vocabulary has a token for each of its bytes. FUSE_UNK (BPE; unigram always does
/// this): adjacent unknown characters become one token. IGNORE_MERGES (BPE): a word in the
/// vocabulary is one token, whatever the merges say.
enum { ENG_TOKENS_BYTE_FALLBACK = 1, ENG_TOKENS_FUSE_UNK = 2, ENG_TOKENS_IGNORE_MERGES = 4 };
/// Flags of an added token. LSTRIP, RSTRIP: a match includes the white space before (after) the
/// token. SINGLE_WORD: the token matches only between word boundaries. NORMALIZED: the token is
/// matched against the normalized text. SPECIAL: decoding can leave the token out.
enum {
  ENG_ADDED_LSTRIP = 1, ENG_ADDED_RSTRIP = 2, ENG_ADDED_SINGLE_WORD = 4, ENG_ADDED_NORMALIZED = 8,
  ENG_ADDED_SPECIAL = 16
};
/// The steps of a stage: normalization (of whole texts), splitting (into words) or decoding. Some
/// steps serve several stages. The comments give the meaning of a step's texts `a` and `b` and of
/// its number `flags`.
enum {
  ENG_STEP_NFC = 1, ENG_STEP_NFD = 2, ENG_STEP_NFKC = 3, ENG_STEP_NFKD = 4,
  ENG_STEP_LOWERCASE = 5,
  ENG_STEP_TRIM = 6,            // flags: 1 trims the left end, 2 the right end
  ENG_STEP_STRIP_ACCENTS = 7,   // flags: 0 removes all marks, 1 only nonspacing marks
  ENG_STEP_NMT = 8,             // SentencePiece: removes control characters; tabs, line feeds and
                                //    special spaces become spaces
  ENG_STEP_CLEAN = 9,           // BERT: removes control characters and U+FFFD; white space becomes
                                //    spaces
  ENG_STEP_CHINESE = 10,        // BERT: puts spaces around Chinese characters
  ENG_STEP_REPLACE = 11,        // a: text to find; b: its replacement; flags: 0 finds `a`,
                                //    1 + ENG_SCAN_* finds matches of this scan instead
  ENG_STEP_PREPEND = 12,        // a: text to prepend; flags: 0 always; 1 unless the word already
                                //    begins with `a`; 2 like 1, but only to a text's first word
  ENG_STEP_BYTES = 13,          // each byte becomes the character that GPT-2 uses for it
  ENG_STEP_CHARSMAP = 14,       // a: SentencePiece's compiled character map
  ENG_STEP_SPLIT = 15,          // a: text to find; flags: a sum of ENG_SPLIT_*, 8 (the text
                                //    between two matches counts as the match) and
                                //    16 * (1 + ENG_SCAN_*) (finds matches of this scan, not of `a`)
  ENG_STEP_FROM_BYTES = 32,     // joins the tokens and reverses ENG_STEP_BYTES
  ENG_STEP_FROM_FALLBACK = 33,  // <0xE2> to bytes
  ENG_STEP_FROM_METASPACE = 34, // a: the character that stands for a space; flags: 1 removes
                                //    this character from the first token
  ENG_STEP_FROM_WORDPIECE = 35, // a: prefix of continuing pieces; flags: 1 removes the space
                                //    before punctuation and contractions, and contracts "do not"
  ENG_STEP_FROM_SUFFIX = 36,    // a: suffix of a word's last piece
  ENG_STEP_FUSE = 37,           // joins all texts into one
  ENG_STEP_CUT = 38             // a: text that each token loses, up to flags & 255 times at its
                                //    start and up to flags >> 8 times at its end
};
/// The stages of eng_tokenizer_step.
enum { ENG_STAGE_NORMALIZE = 0, ENG_STAGE_SPLIT = 1, ENG_STAGE_DECODE = 2 };
/// What SPLIT does with a match. ISOLATED: makes it a word. REMOVED: drops it. CONTIGUOUS: joins
/// adjacent matches into one word. WITH_PREVIOUS (WITH_NEXT): joins it to the text before (after).
enum {
  ENG_SPLIT_ISOLATED = 0, ENG_SPLIT_REMOVED = 1, ENG_SPLIT_CONTIGUOUS = 2,
  ENG_SPLIT_WITH_PREVIOUS = 3, ENG_SPLIT_WITH_NEXT = 4
};
/// What SPLIT and REPLACE can find besides fixed texts. GPT2, LLAMA3, QWEN2 and DEEPSEEK: the words
/// of these models' patterns. SPACE, NUMERIC, PUNCTUATION: one character of this kind. SPACES,
/// DIGITS: a run of white space (numeric characters). DIGITS3: up to three numeric characters.
/// BLANKS: two or more " ". CJK: a run of Chinese characters and Japanese kana. WORDS: \w+ or
/// [^\w\s]+.
enum {
  ENG_SCAN_GPT2 = 0, ENG_SCAN_LLAMA3 = 1, ENG_SCAN_QWEN2 = 2, ENG_SCAN_SPACE = 3,
  ENG_SCAN_SPACES = 4, ENG_SCAN_NUMERIC = 5, ENG_SCAN_PUNCTUATION = 6, ENG_SCAN_WORDS = 7,
  ENG_SCAN_BLANKS = 8, ENG_SCAN_DIGITS3 = 9, ENG_SCAN_DIGITS = 10, ENG_SCAN_CJK = 11,
  ENG_SCAN_DEEPSEEK = 12
};
/// Limits: the largest id; bytes of a token; bytes of a word (the text that the model splits into
/// tokens; if BPE can cut a word, bytes of each part, see words.c); steps of a stage.
enum {
  ENG_TOKENS_MAX_ID = 4194303, ENG_TOKENS_MAX_BYTES = 4096, ENG_TOKENS_MAX_WORD = 1 << 24,
  ENG_TOKENS_MAX_STEPS = 32
};

/// Begins a tokenizer. `model`: ENG_TOKENS_BPE and so on. `flags`: ENG_TOKENS_BYTE_FALLBACK and so
/// on. `unknown`: the id of the token for unknown text; -1: there is none (BPE leaves unknown text
/// out, the other models fail on it); -2: the file names a token that does not exist (every model
/// fails on unknown text). `prefix`: the prefix of continuing pieces, or "". `suffix`: the suffix
/// of a word's last piece, or "". `longest`: WordPiece treats a word of more characters as unknown.
/// Errors: VALUE, MEMORY.
eng_status eng_tokenizer_new(eng_tokenizer **out, int model, int flags, int64_t unknown,
                             const char *prefix, const char *suffix, int64_t longest);
/// Frees a tokenizer. NULL is allowed.
void       eng_tokenizer_free(eng_tokenizer *tokenizer);
/// Adds a token of the model. `score`: its log probability (unigram only). Errors: FORMAT (id out
/// of range or in use; text not UTF-8, too long or, except for unigram, in use; |score| >= 1e300 or
/// NaN), MEMORY.
eng_status eng_tokenizer_token(eng_tokenizer *tokenizer, int64_t id, const char *text, int64_t size,
                               double score);
/// Adds a merge of two tokens. Both tokens must exist, and so must the merged token. Its text is
/// `left`, then `right` without as many bytes at its start as the prefix of continuing pieces has.
/// Later merges rank lower. Errors: FORMAT, MEMORY.
eng_status eng_tokenizer_merge(eng_tokenizer *tokenizer, const char *left, int64_t left_size,
                               const char *right, int64_t right_size);
/// Adds a token that is matched before the text is split into words: in the normalized text with
/// ENG_ADDED_NORMALIZED, else in the original text. `flags`: ENG_ADDED_LSTRIP and so on.
/// Errors: FORMAT, MEMORY.
eng_status eng_tokenizer_added(eng_tokenizer *tokenizer, int64_t id, const char *text, int64_t size,
                               int flags);
/// Appends a step to a stage. Errors: VALUE (too many steps, or a step of another stage), FORMAT
/// (no text to find or cut, or a malformed character map), MEMORY.
eng_status eng_tokenizer_step(eng_tokenizer *tokenizer, int stage, int step, int64_t flags,
                              const char *a, int64_t a_size, const char *b, int64_t b_size);
/// Appends an id to the special tokens that encoding adds after the text (`after`) or before it.
/// Errors: FORMAT (no such token), MEMORY.
eng_status eng_tokenizer_frame(eng_tokenizer *tokenizer, int64_t id, bool after);
/// Completes the tokenizer. Errors: FORMAT (an empty vocabulary; an `unknown` without a token; an
/// added token that normalization empties or makes too long), LIBRARY (libutf8proc), MEMORY.
eng_status eng_tokenizer_ready(eng_tokenizer *tokenizer);

/// Encodes a text as ids, which are valid until the next call. `special`: adds the tokens of
/// eng_tokenizer_frame. Bytes that are not UTF-8 count as U+FFFD, as in Python's
/// bytes.decode("utf-8", "replace"): one U+FFFD for each maximal part of a character. Errors: VALUE
/// (a word of more than ENG_TOKENS_MAX_WORD bytes; unknown text without a token for it), LIBRARY
/// (libutf8proc), MEMORY, INTERRUPTED (at interrupt level 1, too).
eng_status eng_tokenizer_encode(const uint32_t **ids, int64_t *count, eng_tokenizer *tokenizer,
                                const char *text, int64_t size, bool special);
/// Decodes ids to a text, which is valid until the next call. `skip`: leaves out special tokens.
/// Errors: VALUE (an id without a token), MEMORY.
eng_status eng_tokenizer_decode(const char **text, int64_t *size, eng_tokenizer *tokenizer,
                                const uint32_t *ids, int64_t count, bool skip);
/// Returns whether cutting a text after a line feed never changes its ids. The line feed must be
/// the only white space at the end of the first part, and the second part must begin with a visible
/// ASCII character.
bool       eng_tokenizer_splits_lines(const eng_tokenizer *tokenizer);
/// Returns one more than the largest id.
int64_t    eng_tokenizer_size(const eng_tokenizer *tokenizer);
/// Returns the text of a token, exactly as the file has it, or NULL if there is no such id.
const char *eng_tokenizer_text(int64_t *size, const eng_tokenizer *tokenizer, int64_t id);
/// Returns the id of the token with this text, or -1 if there is none.
int64_t    eng_tokenizer_find(const eng_tokenizer *tokenizer, const char *text, int64_t size);
