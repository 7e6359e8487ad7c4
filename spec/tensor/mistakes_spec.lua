-- Mistakes with tensors: each is an error of one line, at the script's own position, that says what
-- to do.
local engine = require "engine"
local helper = require "spec.helper"
local M_ffi = require "engine.base.ffi"

local C = M_ffi.C
local step = helper.in_step

describe("a mistake with tensors", function()
  -- code, and the message in full: one line, at the script's own position
  local cases = {
    { "x:viw(6)", "a tensor has no method 'viw'; did you mean 'view'?" },
    { "x:soft_max()", "a tensor has no method 'soft_max'; did you mean 'softmax'?" },
    { "x.nothing_like_it_at_all", "a tensor has no method 'nothing_like_it_at_all'; hint: "
      .. "docs/from-pytorch.md lists PyTorch's names" },
    { "engine.zerros(2)", "engine has no 'zerros'; did you mean 'zeros'?" },
    { "x[1]", "a tensor cannot be indexed, got x[1]; hint: x:select(1, i), x:slice(1, i, j)" },
    { "(function() x.y = 1 end)()",
      "a tensor's field 'y' cannot be set; hint: x:fill(), x:copy() write elements" },
    { "x < x", "expected two numbers to compare, got a tensor and a tensor; hint: a:lt(b), "
      .. "a:le(b), a:gt(b) and a:ge(b) compare tensors element by element" },

    { "engine.zeros(2, -1)",
      "zeros: expected a dimension to be a whole number of 0 or more, got -1" },
    { "engine.zeros(1.5)",
      "zeros: expected a dimension to be a whole number of 0 or more, got 1.5" },
    { "engine.zeros(2, 'x', 3)",
      "zeros: expected a dimension to be a whole number of 0 or more, got 'x'" },
    { "engine.ones(1, 1, 1, 1, 1, 1, 1)", "ones: expected up to 6 dimensions, got 7" },
    { "engine.zeros(2, 'f23')",
      "there is no dtype 'f23'; did you mean 'f32'?; dtypes: f32 f64 f16 bf16 u8 i8 i16 "
        .. "i32 i64 bool e4m3 e5m2" },
    { "engine.zeros(2, 'fp16')", "there is no dtype 'fp16'; did you mean 'f16'?; dtypes: f32 f64 "
        .. "f16 bf16 u8 i8 i16 i32 i64 bool e4m3 e5m2" },
    { "engine.zeros(2, 'bfloat16')", "there is no dtype 'bfloat16'; did you mean 'bf16'?; dtypes: "
        .. "f32 f64 f16 bf16 u8 i8 i16 i32 i64 bool e4m3 e5m2" },
    { "engine.autocast('f16', print)", "there is no precision 'f16'; did you mean 'fp16'?; "
        .. "precisions: bf16 bf16_kahan bf16_stochastic fp16 fp32 fp4_microsoft fp8_block "
        .. "fp8_block_te fp8_current fp8_delayed fp8_rowwise mxfp4 mxfp4_quartet mxfp4_tetrajet "
        .. "mxfp4_tetrajet_q_ema mxfp4_tseng mxfp8 nvfp4 nvfp4_four_over_six nvfp4_quartet2" },
    { "x:numel()", "a tensor has no method 'numel'; did you mean 'count'?" },
    { "engine.nn.linear(2, 2):state_dict()",
      "a module has no 'state_dict'; did you mean 'state'?" },
    { "engine.nn.linear(2, 2):named_parameters()",
      "a module has no 'named_parameters'; did you mean 'parameters'?" },
    { "engine.optim.sgd(engine.nn.linear(2, 2), { lr = 1 }).param_groups",
      "an optimizer has no 'param_groups'; write opt.lr, and the list opt.groups instead" },
    { "x:cross_entropy(x)",
      "a tensor has no method 'cross_entropy'; write engine.cross_entropy(x, targets) instead" },
    { "x:half()", "a tensor has no method 'half'; write x:to(\"f16\") instead" },
    { "x:mm(x)", "a tensor has no method 'mm'; did you mean 'matmul'?" },
    { "x:clone()", "a tensor has no method 'clone'; write x:contiguous(), or x:keep() for a copy "
      .. "that outlives the step instead" },
    { "x.shape[0]", "shape[0]: dimensions count from 1; x:size(-1) is the last" },
    { "engine.no_grad()",
      "no_grad: expected a function, got nothing; hint: engine.no_grad(function() ... end)" },
    { "engine.rand(2, { dtyp = 'f16' })",
      "rand: unknown option 'dtyp'; did you mean 'dtype'?; options: dtype keep requires_grad" },
    { "engine.zeros { dtype = 'f16' }",
      "zeros: expected a shape first, got a table without numbers" },
    { "engine.zeros(2, true)", "zeros: expected options to be a dtype name or a table, got true" },
    { "engine.zeros(2^30, 2^30)",
      "expected a tensor of up to 2^48 elements, got [1073741824 x 1073741824]" },
    { "engine.full({ 2 }, 'a')", "full: expected the value to be a number, got 'a'" },
    { "engine.tensor()", "tensor: expected a number or a table of numbers, got nothing" },
    { "engine.tensor { 1, 'a' }", "tensor: expected a number as element 2, got 'a'" },
    { "engine.tensor { x = 1 }", "tensor: expected the table to be a list, such as { 1, 2, 3 }, "
      .. "got a table with the field 'x'" },
    { "engine.tensor { { 1, 2 }, { 3 } }",
      "tensor: expected each row at depth 2 to be a table of length 2, like the first row, got a "
        .. "table of length 1" },
    { "engine.tensor { { 1, 2 }, 3 }",
      "tensor: expected each row at depth 2 to be a table of length 2, like the first row, got 3" },
    { "engine.tensor({ 1, 300 }, 'i8')", "tensor: expected whole numbers from -2^7 to "
      .. "2^7 - 1, the range of i8, got 300" },
    { "engine.tensor({ 0.5 }, { dtype = 'i64' })",
      "tensor: expected whole numbers from -2^63 to 2^63 - 1, the range of i64, got 0.5" },
    { "i:fill(0 / 0)",
      "fill: expected whole numbers from -2^63 to 2^63 - 1, the range of i64, got nan" },
    { "engine.full({ 2 }, -1, 'u8')",
      "full: expected whole numbers from 0 to 2^8 - 1, the range of u8, got -1" },
    { "engine.arange(0, 1, 0.5, 'i32')",
      "arange: expected whole numbers from -2^31 to 2^31 - 1, the range of i32, got 0.5" },
    { "engine.tensor { { { { { { { 1 } } } } } } }", "tensor: expected up to 6 dimensions, got 7" },
    { "engine.arange(1)", "arange: expected the last value to be a number, got nothing" },
    { "engine.arange(1, 5, 0)", "arange: expected a step other than 0, got 0" },
    { "engine.randint(5)", "randint: expected the upper bound to be a whole number, got nothing" },
    { "engine.randint(5, 1, 3)", "randint: expected low < high, got 5 and 1" },
    { "engine.zeros(2, { dtype = 'i64', requires_grad = true })",
      "requires_grad: expected a tensor in f32, f64, f16 or bf16, got i64 [2]; hint: " ..
      "x:to(\"f32\")" },
    { "engine.seed(-1)", "seed: expected a whole number from 0 to 2^53, got -1" },
    { "engine.threads('all')",
      "threads: expected a whole number from 0 to 4096 (0: no change), got 'all'" },
    { "engine.device(0)", "device: expected a name, such as 'cuda', got 0" },
    { "engine.memory { limits = 5 }",
      "memory: unknown option 'limits'; did you mean 'limit'?; options: limit" },
    { "engine.memory { limit = 'much' }",
      "memory: expected limit to be a number of bytes >= 0 (0: no limit), got 'much'" },
    { "engine.scope(function() return x + 'a' end)",
      "add: expected two tensors, or a tensor and a number, got 'a'" },
    { "engine.no_grad(function() return x + 'a' end)",
      "add: expected two tensors, or a tensor and a number, got 'a'" },
    { "engine.autocast('fp16', function() return x:matmul(x) end)",
      "matmul: expected [.. x M x K] times [.. x K x N], got f16 [2 x 3] and f16 [2 x 3]" },
    { "engine.device('gpu')", "unknown device 'gpu'; expected cpu, reference, cuda or auto" },

    { "x + engine.zeros(2, 2)",
      "add: f32 [2 x 3] and f32 [2 x 2] do not broadcast: compared from the right, two sizes must "
        .. "be equal, or one of them must be 1" },
    { "x + 'a'", "add: expected two tensors, or a tensor and a number, got 'a'" },
    { "x * {}", "mul: expected two tensors, or a tensor and a number, got a table" },
    { "nil - x", "sub: expected two tensors, or a tensor and a number, got nothing" },
    { "x:lt('a')", "lt: expected two tensors, or a tensor and a number, got 'a'" },
    { "x:clamp(0 / 0, 1)", "clamp: expected the lower limit to be a number, got nan" },
    { "x:clamp(nil, 0 / 0)", "clamp: expected the upper limit to be a number, got nan" },
    { "x:clamp('a')", "clamp: expected the lower limit to be a number, got 'a'" },
    { "x:gelu('fast')", "gelu: expected 'erf' or 'tanh', got 'fast'" },
    { "i:exp()", "exp: expected a floating-point tensor, got i64 [2 x 3]; hint: x:to(\"f32\")" },
    { "-engine.zeros(2, 'bool')", "neg: expected a tensor of numbers, got bool [2]; hint: "
      .. "x:to(\"f32\")" },
    { "x:to('gpu')", "there is no dtype or device 'gpu'; did you mean 'cuda'?; dtypes: f32 f64 f16 "
      .. "bf16 u8 i8 i16 i32 i64 bool e4m3 e5m2; devices: cpu cuda reference" },
    { "x:to(x)", "to: expected the name of a dtype or a device, such as 'bf16' or 'cuda', got a "
      .. "tensor" },
    { "x:to('f32', true)", "to: expected a table of options, got true" },
    { "x:requires_grad('no')", "requires_grad: expected true or false, got 'no'" },
    { "(w * w):sum():backward { retain = 'yes' }",
      "backward: expected retain to be true or false, got 'yes'" },
    { "(w * w):sum():backward { scale = 0 / 0 }",
      "backward: expected scale to be a finite number, got nan" },
    { "x()", "a tensor cannot be called; hint: x:method(...), or model(x)" },
    { "x % 2", "expected two numbers for %, got a tensor; hint: if x >= 0, "
      .. "x - (x / n):to('i64') * n" },
    { "x[{}]", "a tensor cannot be indexed, got x[a table]; hint: x:select(1, i), "
      .. "x:slice(1, i, j)" },
    { "ipairs(x)", "a tensor cannot be looped over; hint: for i = 1, x:size(1) do local row = "
      .. "x:select(1, i)" },
    { "engine.cross_entropy(x, { 0, 1 })",
      "cross_entropy: expected targets to be a tensor, got a table" },
    { "engine.attention(x, nil, x)", "attention: expected k to be a tensor, got nothing" },
    { "engine.profile(5)",
      "profile: expected a function, got 5; hint: engine.profile(function() ... end)" },
    { "x:to('f31')", "there is no dtype or device 'f31'; did you mean 'f32'?; dtypes: f32 f64 f16 "
      .. "bf16 u8 i8 i16 i32 i64 bool e4m3 e5m2; devices: cpu cuda reference" },
    { "x:where(1, 2)", "where: expected a bool condition, got f32 [2 x 3]; hint: compare first, "
      .. "as in x:gt(0)" },
    { "x:gt(0):where(x, engine.zeros(4))",
      "where: f32 [2 x 3] and f32 [4] do not broadcast: compared from the right, two sizes must "
        .. "be equal, or one of them must be 1" },
    { "x:dropout()", "dropout: expected the probability to be a number, got nothing" },
    { "x:dropout(2)", "dropout: expected a probability in [0, 1], got 2" },
    { "x:fill('a')", "fill: expected the value to be a number, got 'a'" },
    { "x:copy(engine.zeros(4))", "copy: f32 [4] does not broadcast into f32 [2 x 3]" },
    { "x:normal(0, -1)",
      "normal: expected a finite mean and a standard deviation >= 0, got 0 and -1" },

    { "x:size(3)", "size: there is no dimension 3 in [2 x 3]; dimensions count from 1, or from "
      .. "-1 backward" },
    { "x:sum(0)", "sum: there is no dimension 0 in [2 x 3]; dimensions count from 1, or from -1 "
      .. "backward" },
    { "x:mean { 1, 3 }",
      "mean: there is no dimension 3 in [2 x 3]; dimensions count from 1, or from -1 backward" },
    { "x:sum { dim = 1 }", "sum: expected the dimensions to be a list, such as { 1, 2 }, got a "
      .. "table with the field 'dim'" },
    { "x:mean(1, 2)", "mean: expected keepdim to be true or false, got 2; hint: write several "
      .. "dimensions as a list, as in x:sum { 1, 2 }" },
    { "x:argmax(1, 1)", "argmax: expected keepdim to be true or false, got 1" },
    { "x:softmax(1)", "softmax: expected the last dimension of [2 x 3], got dimension 1; hint: "
      .. "x:transpose(1, -1) makes it the last" },
    { "x:logsumexp(3)", "logsumexp: there is no dimension 3 in [2 x 3]; dimensions count from 1, "
      .. "or from -1 backward" },
    { "x:logsumexp(-1, 1)", "logsumexp: expected keepdim to be true or false, got 1" },
    { "engine.tensor({ -1 }, 'u16')", "there is no dtype 'u16'; did you mean 'f16'?; dtypes: f32 "
        .. "f64 f16 bf16 u8 i8 i16 i32 i64 bool e4m3 e5m2" },
    { "x:topk(1, 1)", "topk: expected the last dimension of [2 x 3], got dimension 1; hint: "
      .. "x:transpose(1, -1) makes it the last" },
    { "engine.stack({ x, x }, 0)", "stack: expected a dimension from 1 to 3 for [2 x 3], got 0" },
    { "engine.randint(0, 300, 2, 'u8')",
      "randint: expected whole numbers from 0 to 2^8 - 1, the range of u8, got 299" },
    { "x:copy()", "copy: expected a tensor, a number or a table of numbers, got nothing" },
    { "x:norm(1)", "norm: expected no argument or 2, for the Euclidean norm, got 1" },
    { "x:max('a')", "max: expected a dimension to be a whole number, got 'a'" },
    { "engine.zeros(0):max()", "max: expected at least one element, got f32 [0]" },
    { "x:argmax(3)", "argmax: there is no dimension 3 in [2 x 3]; dimensions count from 1, or "
      .. "from -1 backward" },
    { "x:topk(4)", "topk: expected k in 0..3, got 4" },
    { "x:topk()", "topk: expected k to be a whole number of 0 or more, got nothing" },
    { "x:view(4, -1)", "view: f32 [2 x 3] has 6 elements and cannot become [4 x -1]" },
    { "x:view('a')", "view: expected a dimension to be a whole number, got 'a'" },
    { "x:permute(1, 1)", "permute: expected each dimension of f32 [2 x 3] exactly once, got " ..
      "dimension 1 twice" },
    { "x:permute(1)", "permute: expected the 2 dimensions of [2 x 3] in a new order, got a " ..
      "list of 1" },
    { "x:permute(0, 1)",
      "permute: there is no dimension 0 in [2 x 3]; dimensions count from 1, or from -1 backward" },
    { "x:transpose(1, 3)",
      "transpose: there is no dimension 3 in [2 x 3]; dimensions count from 1, or from -1 "
        .. "backward" },
    { "engine.zeros(2):transpose()", "transpose: expected at least 2 dimensions, got [2]" },
    { "x:expand(4, 3)", "expand: f32 [2 x 3] does not broadcast to [4 x 3]" },
    { "x:slice(1, 0, 1)", "slice: positions count from 1, or from -1 backward; got 0" },
    { "x:slice(3, 1, 1)",
      "slice: there is no dimension 3 in [2 x 3]; dimensions count from 1, or from -1 backward" },
    { "x:slice(1, 1, 2, 0)", "slice: expected the step to be a whole number of 1 or more, got 0" },
    { "x:slice()", "slice: expected a dimension to be a whole number, got nothing" },
    { "x:select(1, 3)", "select: there is no position 3 in dimension 1 of [2 x 3]; "
      .. "positions count from 1, or from -1 backward" },
    { "x:select(1, 0)", "select: there is no position 0 in dimension 1 of [2 x 3]; "
      .. "positions count from 1, or from -1 backward" },
    { "x:split({ 1, 1 }, 2)",
      "split: the parts add up to 2, but dimension 2 of [2 x 3] has size 3" },
    { "x:split(0)", "split: expected the size of a part to be a whole number of 1 or more, got 0" },
    { "x:chunk(2)", "chunk: dimension 2 of [2 x 3] does not divide into 2 equal parts; hint: "
      .. "x:split(2, 2) makes a smaller last part" },
    { "x:squeeze(3)", "squeeze: there is no dimension 3 in [2 x 3]; dimensions count from 1, or "
      .. "from -1 backward" },
    { "x:unsqueeze(4)", "unsqueeze: expected a dimension from 1 to 3 for [2 x 3], got 4" },
    { "engine.concat {}", "concat: expected a list of tensors, got an empty one" },
    { "engine.concat(x)", "concat: expected a list of tensors, got a tensor" },
    { "engine.concat { 1, 2 }", "concat: expected entry 1 of the list to be a tensor, got 1" },
    { "engine.concat { x, nil, x }", "concat: expected entry 2 of the list to be a tensor, "
      .. "got nothing" },
    { "engine.stack { x, nil, x }", "stack: expected entry 2 of the list to be a tensor, "
      .. "got nothing" },
    { "engine.tensor { 1, nil, 3 }",
      "tensor: expected a number as element 2, got nothing" },
    { "engine.zeros { 2, nil, 3 }",
      "zeros: expected a dimension to be a whole number of 0 or more, got nothing" },
    { "engine.concat({ x, engine.zeros(3, 2) }, 1)",
      "concat: the sizes of f32 [2 x 3] and f32 [3 x 2] differ outside dimension 1" },
    { "engine.concat({ x, x }, 3)",
      "concat: there is no dimension 3 in [2 x 3]; dimensions count from 1, or from -1 backward" },
    { "engine.stack { engine.zeros(2), engine.zeros(3) }",
      "stack: expected tensors of one shape, got [2] and [3]" },
    { "x:item()", "item: expected a tensor of one element, got f32 [2 x 3]" },
    { "x:gather(1, x)", "gather: expected index of an integer dtype, got f32 [2 x 3]; hint: "
      .. "index:to(\"i64\")" },
    { "x:gather(1, i:view(6))",
      "gather: the index i64 [6] must have as many dimensions as f32 [2 x 3] and no larger "
        .. "sizes outside dimension 1" },
    { "x:embedding(engine.tensor({ 1, 5 }, 'i64'))",
      "embedding: expected indices in 0..1, got 5 at position 2 of i64 [2]" },
    { "x:embedding(engine.tensor({ -1 }, 'i64'))",
      "embedding: expected indices in 0..1, got -1 at position 1 of i64 [1]" },
    { "engine.zeros(0, 3):embedding(engine.tensor({ 4 }, 'i64'))",
      "embedding: expected no indices into a dimension of size 0, got 4 at position 1 of i64 [1]" },

    { "x:matmul(x)", "matmul: expected [.. x M x K] times [.. x K x N], got f32 [2 x 3] and f32 "
      .. "[2 x 3]" },
    { "x:matmul(x, true, true)",
      "matmul: expected [.. x M x K] times [.. x K x N], got f32 [2 x 3] (transposed) and f32 [2 "
        .. "x 3] (transposed)" },
    { "x:matmul(3)", "matmul: expected a tensor, got 3" },
    { "x:matmul(i:transpose())",
      "matmul: expected a floating-point tensor, got i64 [3 x 2]; hint: x:to(\"f32\")" },
    { "engine.zeros(2, 3, 4):matmul(engine.zeros(3, 4, 2))",
      "matmul: the batch dimensions of f32 [2 x 3 x 4] and f32 [3 x 4 x 2] do not broadcast" },
    { "x:linear(engine.zeros(4, 4))",
      "linear: expected x [.. x K] and a weight [N x K], got f32 [2 x 3] and f32 [4 x 4]" },
    { "x:linear(engine.zeros(4, 3), engine.zeros(3))",
      "linear: expected a bias of shape [4], got f32 [3]" },
    { "x:linear(engine.zeros(4, 3), 5)", "linear: expected bias to be a tensor, got 5" },
    { "x:layer_norm(engine.zeros(4))", "layer_norm: expected a weight of shape [3], got f32 [4]" },
    { "x:rms_norm(nil, 'a')", "rms_norm: expected eps to be a number, got 'a'" },
    { "engine.mse(x, engine.zeros(3))",
      "mse: expected two tensors of the same shape, got f32 [2 x 3] and f32 [3]" },
    { "engine.cross_entropy(x, engine.zeros(2))",
      "cross_entropy: expected targets of an integer dtype, got f32 [2]; hint: "
        .. "targets:to(\"i64\")" },
    { "engine.cross_entropy(x, engine.zeros(3, 'i64'))",
      "cross_entropy: expected logits [.. x V] with V >= 1 and targets of shape [2], got f32 "
        .. "[2 x 3] and i64 [3]" },
    { "engine.cross_entropy(x, engine.tensor({ 0, 3 }, 'i64'))",
      "cross_entropy: expected targets in 0..2 (or -100, ignored), got 3 at row 2 of i64 [2]; "
        .. "hint: does the vocabulary of the data fit the model?" },
    { "engine.cross_entropy(x, i, { reduction = 'average' })",
      "cross_entropy: expected reduction mean, sum or none, got 'average'" },
    { "engine.cross_entropy(x, i, { smoothing = 0.1 })",
      "cross_entropy: unknown option 'smoothing'; options: ignore_index label_smoothing "
      .. "reduction soft_cap z_loss" },
    { "engine.attention(x, x, x)",
      "attention: expected q [B x T x H x D] and k, v [B x S x G x D] with H a multiple of G, "
        .. "got f32 [2 x 3], f32 [2 x 3] and f32 [2 x 3]" },
    { "engine.attention(x, x, x, { casual = true })",
      "attention: unknown option 'casual'; did you mean 'causal'?; options: causal entropy "
        .. "logit_max scale site" },
    { "x:rope()", "rope: expected [B x T x H x D] with an even D, got f32 [2 x 3]" },
    { "engine.ones(1, 2, 1, 2):rope { factor = -1 }",
      "rope: expected a factor > 0, or 0 for unscaled frequencies, got -1" },
    { "engine.ones(1, 2, 1, 2):rope { factor = 8, context = 9, low = 4, high = 1 }",
      "rope: expected a context > 0 and 0 < low < high, got context 9, low 4 and high 1" },

    { "x:backward()", "backward: expected a loss of one element, got f32 [2 x 3]; hint: "
      .. "loss:sum() or loss:mean()" },
    { "x:sum():backward()",
      "backward: nothing in this loss requires a gradient; hint: x:requires_grad(true), and no "
        .. "engine.no_grad() around the forward pass" },
    { "(w * w):backward { retian = true }",
      "backward: unknown option 'retian'; did you mean 'retain'?; options: retain scale" },
    { "(w * w):requires_grad()", "requires_grad: expected a leaf, got f32 [1], which a "
      .. "recorded operation computed; hint: x:detach() is a leaf" },
    { "twice()", "backward: an earlier backward emptied the tape of this loss; hint: "
      .. "backward{retain=true} in the earlier call" },
    { "engine.zeros(2, nil, 3)",
      "zeros: expected a dimension to be a whole number of 0 or more, got nothing" },
    { "engine.ones(2, nil, 'f16')",
      "ones: expected a dimension to be a whole number of 0 or more, got nothing" },
    { "x:view(2, nil, 3)", "view: expected a dimension to be a whole number, got nothing" },
    { "engine.zeros(2, 3, 4):permute(1, nil, 2)",
      "permute: expected a dimension to be a whole number, got nothing" },
    { "engine.zeros(0):chunk(1e9)",
      "chunk: expected up to 7000 parts, got 1000000000; hint: x:slice() in a loop" },
    { "engine.zeros(9000):split(1)",
      "split: expected up to 7000 parts, got 9000; hint: x:slice() in a loop" },
    { "engine.gradcheck(5, { x })",
      "gradcheck: expected a function, got 5; hint: engine.gradcheck(f, { x })" },
    { "engine.gradcheck(engine.ones, { x }, { tol = 1 })",
      "gradcheck: unknown option 'tol'; options: eps samples tolerance" },
    { "engine.contest { policies = { 'a' }, seeds = 0, run = engine.ones }",
      "contest: expected seeds to be a whole number of 1 or more, got 0" },
    { "engine.contest { policies = { 'a' }, run = function() return { path = 'x' } end }",
      "contest: expected 'path' of run's result to be a number, got 'x'" },
    { "engine.ranks.from_first(5)", "ranks.from_first: expected a string or nil, got 5" },
    { "engine.gradcheck(engine.ones, x)",
      "gradcheck: expected the inputs to be a list, such as { x, weight }, got a tensor" },
    { "engine.gradcheck(engine.ones, { x, 5 })",
      "gradcheck: expected input 2 to be a tensor, got 5" },
    { "engine.gradcheck(engine.ones, { x })",
      "gradcheck: expected at least one input in f64, got none; hint: x:to('f64'):keep()" },
    { "engine.gradcheck(engine.ones, { x }, { eps = 0 })",
      "gradcheck: expected eps to be a number above 0, got 0" },
    { "engine.fp8.quantize(engine.tensor(1))",
      "fp8.quantize: expected rows of 1 or more elements, got f32 []" },
    { "engine.attention(x, x, x, { scale = 1 / 0 })",
      "attention: expected scale to be finite, got inf" },
    { "engine.custom { forward = function(_, x) local y = x * 1 return y, y end, " ..
      "backward = function(_, dy) return dy end }(engine.ones(2, { requires_grad = true }))",
      "custom: expected result 2 of forward to be a new tensor of this step, got f32 [2], which " ..
      "is also an earlier result; hint: x:contiguous() is new" },
    { "engine.custom {}",
      "custom: expected { forward = function(saved, ...), backward = function(saved, ...) }" },
  }

  for _, case in ipairs(cases) do
    it(case[1] .. " raises one clear line", step(function()
      local w = engine.tensor({ 2 }, { requires_grad = true })
      local place = { engine = engine, x = engine.zeros(2, 3), i = engine.zeros(2, 3, "i64"),
        w = w, ipairs = ipairs, twice = function()
        local loss = (w * w):sum()
        loss:backward()
        loss:backward()
      end }
      local chunk = assert(loadstring("local y = " .. case[1] .. "\nreturn y", "=script"))
      local good, message = pcall(setfenv(chunk, place))
      assert.is_false(good, case[1] .. " was accepted")
      if case[1] == "twice()" then message = message:gsub("^[^:]+:%d+", "script:1") end
      assert.equal("script:1: " .. case[2], message)
      assert.is_nil(message:find("\n"))
    end))
  end

  it("changes nothing in the engine", step(function()
    pcall(function() return engine.zeros(2, 3):matmul(engine.zeros(2, 3)) end)
    pcall(function() return engine.zeros(2):embedding(engine.zeros(1)) end)
    assert.same({ { 11 } },
      engine.tensor { { 1, 2 } }:matmul(engine.tensor { { 3 }, { 4 } }):totable())
    assert.equal(0, C.eng_tape_length())
  end))
end)
