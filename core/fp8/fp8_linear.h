// Linear layers in FP8: sites, their recipes, amaxes and meters. See engine.h for what each function promises and fp8_linear.c for
// how a layer computes. Called by op.c (forward), grad_nn.c (backward), params.c (weights' copies) and Lua.
#ifndef ENG_FP8_LINEAR_H
#define ENG_FP8_LINEAR_H

#include "autograd/op.h"
#include "autograd/tape.h"

/// A weight's FP8 copy, made anew when what it was made from, its site or its factor changed.
typedef struct fp8_weight {
  int64_t  site;
  uint32_t recipe, seen;       // version of the site's recipe, storage.writes of the source
  const tensor *source;        // the master, or its low-precision copy
  double   factor;
  tensor  *q, *scale, *q_t, *scale_t;   // q_t: where the blocks are not square, for the gradient of x
} fp8_weight;

/// Which codes, and of which recipe.
typedef struct fp8_stamp {
  const void *codes;
  int64_t  site;
  uint32_t version;            // the site's recipe in force
} fp8_stamp;
/// Zeros for NULL.
fp8_stamp fp8_weight_stamp(const fp8_weight *weight);
/// The copy is made anew, in its place, when it is wanted next. NULL is fine.
void fp8_weight_outdate(fp8_weight *weight);
/// Forgets a weight's copy; its memory goes when the tape no longer looks at it. NULL is fine.
void fp8_weight_free(fp8_weight *weight);
/// Bytes of a copy.
int64_t fp8_weight_bytes(const fp8_weight *weight);

/// Whether there is such a site and it has a recipe.
bool fp8_site_on(int64_t site);
/// linear {x, w, bias?} of site ints[0], recorded with what its backward pass needs. `swiglu`: the call behind an x that has no memory, whose
/// codes are made from its inputs; NULL: x has numbers.
eng_status fp8_linear(op_call *call, const eng_precision *precision, const op_call *swiglu);
/// A recorded linear that ran in FP8: it has more inputs than a script can give.
static inline bool fp8_is_linear(const op_call *call) { return call->op == ENG_OP_linear && call->n_in > 3; }
/// Whether a SwiGLU in front of this site keeps its inputs in FP8 alone.
bool fp8_site_recomputes(int64_t site);
const eng_fp8_role *fp8_site_role(int64_t site, int role);
/// Puts the codes of a swiglu's inputs among them, before it is recorded.
eng_status fp8_keep_swiglu(op_call *call);
static inline bool fp8_is_swiglu(const op_call *call) { return call->op == ENG_OP_swiglu && call->n_in > 2; }
/// Whether swiglu {gate, up} of site ints[0] and the linear behind it can run with no numbers in between, and both of them.
bool fp8_swiglu_fits(const op_call *swiglu);
eng_status fp8_swiglu_linear(op_call *swiglu, op_call *linear, const eng_precision *precision);
/// Whether meters are on: they compare numbers with their codes.
bool fp8_measuring(void);
/// The inputs behind the codes of such a node, and its output made from them.
eng_status fp8_swiglu_inputs(tensor *out[2], const op_call *node);
eng_status fp8_swiglu_again(tensor **y, const op_call *node);
/// An attention whose output stands on the tape as the e5m6 codes that the linear after it keeps, and nowhere else.
static inline bool fp8_is_attention(const op_call *call) { return call->op == ENG_OP_attention && call->n_in > 3; }
/// That output, in its own format and shape, made from the codes.
eng_status fp8_attention_output(tensor **y, const op_call *node);
/// The gradient rule of linear.
eng_status fp8_linear_grad(grad_call *g);

#endif
