// Part of engine.h; only engine.h includes this file. FP8 and microscaling: rules and accumulators,
// conversion of single numbers to and from codes, and the sites, recipes and meters of linear
// layers.

/// A format of the operations quantize and dequantize (ops.def), in addition to the dtypes e4m3 and
/// e5m2.
enum { ENG_FORMAT_E5M6 = 12 };
/// Formats of the elements of mx_quantize, in addition to e4m3 and e5m2 (core/base/mx.h).
enum {
  ENG_FORMAT_E2M1 = 13, ENG_FORMAT_E2M3 = 14, ENG_FORMAT_E3M2 = 15, ENG_FORMAT_MXINT8 = 16
};
/// How mx_quantize scales a block (core/base/mx.h).
enum {
  ENG_MX_FLOOR = 0, ENG_MX_CEIL = 1, ENG_MX_EVEN = 2, ENG_MX_RCEIL = 3, ENG_MX_NVFP4 = 4,
  ENG_MX_FOUR_OVER_SIX = 5, ENG_MX_FOUR_OVER_SIX_MSE = 6, ENG_MX_QUEST = 7, ENG_MX_MS_EDEN = 8,
  ENG_MX_RULES = 9
};
/// One more rule, which only a recipe can name. It runs the operation msamp_fp4 instead of
/// mx_quantize.
enum { ENG_MX_MSAMP_FP4 = 9 };

/// How `quantize` computes a block's scale from its amax. Each rule is named after the project that
/// uses it (core/base/fp8_scale.h).
enum {
  ENG_SCALE_TRANSFORMER_ENGINE = 0, ENG_SCALE_DEEPSEEK = 1, ENG_SCALE_DEEPGEMM = 2,
  ENG_SCALE_TORCHAO = 3, ENG_SCALE_MSAMP = 4, ENG_SCALES = 5
};
/// How fp8_matmul sums along K. FP32: in f32, in the order that ops.def gives. EXACT: in f64.
/// HOPPER: as Hopper's tensor cores do (13 fraction bits, 32 products at a time, truncated). E4M3:
/// products and running sum are rounded to e4m3, saturating. DEVICE: the device's own method.
/// BLACKWELL: as Blackwell's tensor cores do. DEVICE and BLACKWELL are allowed only in a
/// microscaling recipe (eng_fp8_product), which otherwise allows only FP32.
enum {
  ENG_ACCUMULATE_DEVICE = -1, ENG_ACCUMULATE_FP32 = 0, ENG_ACCUMULATE_EXACT = 1,
  ENG_ACCUMULATE_HOPPER = 2, ENG_ACCUMULATE_E4M3 = 3, ENG_ACCUMULATORS = 4,
  ENG_ACCUMULATE_BLACKWELL = 4
};

/// Returns the code of x in a small format: "e4m3", "e5m2", "e5m6", "e5m6_tilekernels" (as
/// TileKernels rounds), "ue8m0", "ue4m3" (of |x|), "e4m3_ieee" (with Inf), "f16", "bf16", "tf32",
/// or a format that always saturates: "e2m1", "e2m3", "e3m2", "int8", "mxint8" (in units of 1/64).
/// Rounds to nearest even (except "e5m6_tilekernels"). Mode 1 saturates (except f16 and bf16); mode
/// 0 does not. For "ue8m0" the modes are different: 0 rounds |x| down to a power of two, 1 rounds
/// |x| up, and 4 rounds x to the nearest power, ties up. Returns -1 for an unknown format.
int64_t eng_small_encode(const char *format, double x, int mode);
/// Returns the number that a code stands for, or NaN for an unknown format.
double eng_small_decode(const char *format, uint32_t code);

/// A site is one linear layer under an FP8 recipe: it holds the recipe, and the amaxes and meters
/// of its tensors. The operation fp8_linear names a site and runs in FP8 while eng_precision.fp8 is
/// 1. fp8_linear quantizes three tensors, called the roles of the site: the input x, the weight W
/// and the output's gradient dy.
enum { ENG_FP8_X = 0, ENG_FP8_W = 1, ENG_FP8_DY = 2, ENG_FP8_ROLES = 3 };
/// The three products of a site: y = x W^T, dx = dy W, dW = dy^T x.
enum { ENG_FP8_FORWARD = 0, ENG_FP8_DGRAD = 1, ENG_FP8_WGRAD = 2, ENG_FP8_PRODUCTS = 3 };
/// The form in which x is kept for dW. CODES: the codes of the forward product; if dW needs blocks
/// along the other dimension, the values of these codes are quantized again. TRANSPOSED: codes of
/// the transposed x, which the forward pass computes from x. E5M6: x in e5m6, in blocks of 1 x 128
/// with power-of-two scales. SWIGLU: if x is the output of an fp8_swiglu that keeps its inputs as
/// codes, in the format of its site's x, x is not kept and is recomputed from these codes.
/// Any other x is kept as with CODES.
enum {
  ENG_FP8_KEEP_CODES = 0, ENG_FP8_KEEP_TRANSPOSED = 1, ENG_FP8_KEEP_E5M6 = 2,
  ENG_FP8_KEEP_SWIGLU = 3
};

/// Signs of a random Hadamard transform. NONE: all positive. FIXED: Transformer Engine's signs.
/// LAYER: random signs for each layer. STEP: random signs for each layer and step. BACKWARD: random
/// signs for each layer and backward pass.
enum {
  ENG_FP8_SIGNS_NONE = -1, ENG_FP8_SIGNS_FIXED, ENG_FP8_SIGNS_LAYER, ENG_FP8_SIGNS_STEP,
  ENG_FP8_SIGNS_BACKWARD
};

/// How one role of a layer (its input, weight or output gradient) becomes FP8.
typedef struct eng_fp8_role {
  int32_t format;                     // ENG_e4m3, ENG_e5m2; microscaling: also ENG_FORMAT_*
  int32_t block_rows, block_columns;  // 0: the whole dimension
  int32_t rule, pow2, margin;         // as in quantize; pow2: its flag QUANTIZE_POW2
  int32_t stochastic;                 // quantize's flag QUANTIZE_STOCHASTIC; microscaling: sr_bits
                                      // of mx_quantize
  int32_t keep;                       // only for x: ENG_FP8_KEEP_*
  int32_t mx;                         // microscaling: ENG_MX_* + 1, instead of `rule`; else 0
  int32_t dge, drops;                 // as `gate` and `drops` in msamp_fp4; dge: only for w
  double  clamp;                      // as in msamp_fp4
  double  eps;                        // negative: the rule's default
  double  factor;                     // microscaling: as in mx_quantize; products are divided by it
  double  average;                    // microscaling, only for w: the decay (below 1) of the
                                      // average toward which w is rounded (eng_fp8_average);
                                      // 0: no average
} eng_fp8_role;
/// How a product of a layer sums along K: `accumulator` and `promotion` as in fp8_matmul. In
/// microscaling, FP32 is an ordinary product of bf16 numbers. BLACKWELL is the operation mx_matmul
/// if it supports the sizes and formats of all products of the layer, else FP32. DEVICE is
/// BLACKWELL if the device's own units compute products of these formats, else FP32.
/// If `high` is 1, the product is computed in high precision; only the forward product of
/// microscaling allows this. If `hadamard` is not 0, both factors are transformed along the summed
/// dimension before quantization, as by the operation hadamard with n = hadamard and the signs that
/// `signs` (ENG_FP8_SIGNS_*) selects; only microscaling allows this.
typedef struct eng_fp8_product {
  int32_t accumulator, promotion, high, hadamard, signs;
} eng_fp8_product;
/// How a layer computes in FP8: a role for each of its tensors, a product for each of its passes.
/// In microscaling, x, w and dy have microscaling rules (`mx`), but dy may instead be in FP8, in
/// square blocks with power-of-two scales. Only microscaling uses `backward`, which says how the
/// backward products get x and w. backward[].mx is 0 for both x and w or for neither. If it is 0, x
/// and w themselves are quantized, as role[] says. If it is ENG_FP8_SAME, the quantized x and w of
/// the forward product are used again. Otherwise the quantized x and w of the forward product are
/// quantized again, as backward[] says. Unless backward[].mx is 0, dx and dw are multiplied by the
/// `gate` (ops.def) that mx_quantize or msamp_fp4 gave for x or w, if any, and then go through the
/// forward product's Hadamard transform.
enum { ENG_FP8_SAME = -1 };
typedef struct eng_fp8_recipe {
  eng_fp8_role role[3];               // ENG_FP8_X, W, DY
  eng_fp8_role backward[2];           // ENG_FP8_X, W
  eng_fp8_product product[3];         // ENG_FP8_FORWARD, DGRAD, WGRAD
} eng_fp8_recipe;

/// Creates a site and sets *site to its number, which is 1 or more and never reused. `name` is used
/// in messages.
eng_status eng_fp8_site_new(int64_t *site, const char *name);
void       eng_fp8_site_free(int64_t site);
/// Returns an error if `recipe` is not valid for a layer: VALUE, SHAPE, or DTYPE (a format that is
/// not allowed for its role or rule).
eng_status eng_fp8_recipe_check(const eng_fp8_recipe *recipe);
/// Sets the recipe of a site. NULL makes the site compute in high precision. Allowed only while
/// the tape has no operations. Errors: those of eng_fp8_recipe_check, STATE.
eng_status eng_fp8_site_set(int64_t site, const eng_fp8_recipe *recipe);
/// Delayed scaling: from now on, the role's scale is computed from `amax` instead of the measured
/// amax. The role's block must be the whole tensor. If `amax` is 0, the scale is computed from the
/// measured amax again. Errors: VALUE, STATE (the site has no recipe).
eng_status eng_fp8_delay(int64_t site, int role, double amax);
/// Sets the average over steps toward which W is rounded if the recipe's role w has `average`
/// (Q-EMA of TetraJet, the input `average` of mx_quantize): f32 in the shape of W, or NULL. Until
/// it is set, W is rounded to nearest. The caller keeps the tensor, and updates it between steps.
/// Errors: STATE, STALE, DTYPE.
eng_status eng_fp8_average(int64_t site, const eng_tensor *average);
/// Returns the largest magnitude of each role's tensor since the last call: inf or nan if the
/// tensor contained one, -1 if nothing was quantized. Waits for the device. All sites share 4,096
/// slots for amaxes on the device. When the slots are full, they are reused. Their amaxes are
/// collected first if this function was called since the slots were last full; otherwise they are
/// lost. So call this function before the steps of interest, and again before the slots fill up
/// twice.
eng_status eng_fp8_amax(double amax[3], int64_t site);

/// Returns the accumulator that a microscaled layer used in its last forward pass,
/// ENG_ACCUMULATE_FP32 or ENG_ACCUMULATE_BLACKWELL. Returns -1 if the layer has not run or is not
/// microscaled, or if there is no such site.
int        eng_fp8_accumulator(int64_t site);

/// Effects of quantization on the measured elements. Up to 2^16 elements of each tensor are
/// measured, in evenly spaced whole rows; of longer rows, the first one.
typedef struct eng_fp8_meter {
  int64_t count, zeros;               // finite elements; zeros (0 or -0) among them
  int64_t underflow;                  // nonzero elements that became 0 or -0
  int64_t overflow;                   // elements too large for the format, which saturated
  int64_t nonfinite;                  // inf and nan; not in count
  double  signal, error;              // sums of x^2 and, where finite, of (x - dequantized x)^2
  double  amax, least;                // largest |x|, smallest nonzero |x|; 0 if every x is 0
  double  scale_min, scale_max;       // of the blocks with a nonzero element; 0 if there are none
} eng_fp8_meter;
/// Sets the number of the next step. The signs of ENG_FP8_SIGNS_STEP are a function of this number.
void       eng_fp8_step(int64_t step);
/// Turns meters on or off; returns the previous setting. Meters copy the measured rows to the host.
bool       eng_fp8_measure(bool on);
/// Returns the measurements of each role since the last call.
eng_status eng_fp8_meters(eng_fp8_meter meter[3], int64_t site);
/// Returns how many bytes of the step's memory the gradient rules on the tape will read. Parameters
/// and kept tensors do not count, and memory that several rules read counts once. `fp8` receives
/// how many of these bytes are FP8 codes and scales. Returns -1 if the host is out of memory.
int64_t    eng_tape_bytes(int64_t *fp8);
