-- Runs random operations: random shapes (empty, 1, six dimensions, mismatched), all dtypes, sliced,
-- transposed and expanded inputs, out-of-range attributes, absent and stale inputs, invalid
-- operation numbers; through run of engine.base.ffi, raw calls and tensor methods; with and without
-- recording and backward; on both devices and every instruction set. Checks: a call succeeds or
-- raises a string; both devices agree on which, and on shapes and dtypes of the outputs; the step's
-- memory is empty after every step. Writes outside a kernel's memory are found by the sanitizer
-- build of `make check`. With ENGINE_TEST_DEVICE=cuda the card is compared with the reference
-- instead, including values: bit for bit for the operations in EXACT, within a tolerance for others
-- where all numbers are ordinary. Round i depends only on the seed and i.
-- Usage: engine spec/fuzz/ops.lua [seconds [seed [first round [rounds]]]]
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local made = require "spec.fuzz.made"
local plans = require "spec.fuzz.op_plans"
local tensor = require "engine.tensor.tensor"

local CARD = os.getenv("ENGINE_TEST_DEVICE")
local ffi, C, call = M_ffi.ffi, M_ffi.C, M_ffi.call
local draw, chance, one_of, shape_of = made.draw, made.chance, made.one_of, made.shape_of
local WILD_INTS, WILD_FLOATS = made.WILD_INTS, made.WILD_FLOATS
local function any(shape) return made.tensor_of(shape, one_of(made.DTYPES)) end
local seconds, seed, first, rounds = tonumber(arg[1]) or 20, tonumber(arg[2]) or 1, tonumber(arg[3])
  or 1, tonumber(arg[4]) or 1e9

-- ------------------------------------------------------------------ spoiling a call

local stale

local function spoil(inputs, ints, floats)
  local what = #inputs > 0 and draw(7) or 3
  if what == 0 then inputs[draw(#inputs) + 1] = any(shape_of(0, 6))
  elseif what == 1 then inputs[draw(#inputs) + 1] = false
  elseif what == 2 then
    inputs[draw(#inputs) + 1] = one_of { stale, M_ffi.Tensor(draw(2 ^ 20), draw(9)),
      M_ffi.Tensor(2 ^ 32 - 1, 2 ^ 32 - 1) }
  elseif what == 3 then inputs[#inputs + 1] = any(shape_of(0, 3))
  elseif what == 4 then inputs[#inputs] = nil
  elseif what == 5 then
    local at = draw(8) + 1
    for k = #ints + 1, at do ints[k] = 0 end
    ints[at] = one_of(WILD_INTS)
  else
    local at = draw(4) + 1
    for k = #floats + 1, at do floats[k] = 0 end
    floats[at] = one_of(WILD_FLOATS)
  end
end

-- ------------------------------------------------------------------ running a call on every device

local isas = {}
for _, name in ipairs { "plain", "avx2", "avx512" } do
  if C.eng_cpu_isa(name) ~= nil then isas[#isas + 1] = name end
end

local function describe(name, inputs, ints, floats)
  local parts = {}
  for k = 1, 16 do
    local x = inputs[k]
    if x == nil then break end
    local good, text = pcall(function() return x and x.dtype .. " " .. tensor.shape_text(x.shape)
      or "absent" end)
    parts[#parts + 1] = good and text or "stale"
  end
  local numbers = {}
  for _, v in ipairs(ints) do numbers[#numbers + 1] = tostring(v):gsub("LL$", "") end
  for _, v in ipairs(floats) do numbers[#numbers + 1] = tostring(v) end
  return ("%s(%s; %s)"):format(name, table.concat(parts, ", "), table.concat(numbers, " "))
end

local function bug(...) error({ bug = table.concat({ ... }, " ") }, 0) end

--- Returns the outcome as text (shapes and dtypes, or "error"), the outputs, whether devices may
--- differ, and the message of an error.
local function attempt(f, ...)
  local results = { pcall(f, ...) }
  if results[1] then
    local texts = {}
    for k = 2, 9 do
      local y = results[k]
      texts[#texts + 1] = y and y.dtype .. tensor.shape_text(y.shape) or "-"
    end
    return table.concat(texts, " "), results
  end
  local message = results[2]
  if type(message) ~= "string" or #message < 8 then
    bug("an error that is not a string of at least 8 bytes:", tostring(message))
  end
  -- a made-up handle may name an existing tensor on another device
  local elsewhere = message:find("in the memory of the current device", 1, true)
  return "error", nil, elsewhere ~= nil or message:find("out of memory", 1, true) ~= nil, message
end

local FLOAT = { f32 = true, f64 = true, f16 = true, bf16 = true }

local function backward(y)
  if not y or not FLOAT[y.dtype] or y.count > 1e5 then return end
  y:sum():backward { scale = one_of { 1, 65536, 1e300, 0 / 0 }, retain = chance(10) }
end

local function compare(name, inputs, ints, floats, n_out)
  local recorded = chance(40)
  if recorded then
    for _, x in ipairs(inputs) do
      if x and chance(70) then pcall(x.requires_grad, x, true) end
    end
  end
  local precision = chance(25) and one_of { "fp16", "bf16" } or nil
  if name:find("^fp8_") and chance(70) then precision = "fp8_block" end
  local function run()
    if precision then
      return engine.autocast(precision, M_ffi.run, name, inputs, ints, floats, n_out)
    end
    return M_ffi.run(name, inputs, ints, floats, n_out)
  end
  local isa = one_of(isas)
  C.eng_cpu_isa(isa)
  local seen, texts = {}, {}
  local random = made.state
  for i, device in ipairs { "cpu", "reference" } do
    engine.device(device)
    made.state = random
    local text, results, no_memory, message = attempt(run)
    if results and recorded then
      local more, _, lacking, problem = attempt(backward, results[2])
      text, no_memory, message = text .. " backward " .. more, lacking, problem
      for _, x in ipairs(inputs) do
        local good, grad = pcall(function() return x and x.grad end)
        if good and grad then text = text .. " " .. grad.dtype .. tensor.shape_text(grad.shape) end
      end
    end
    if no_memory then engine.device("cpu") return end
    seen[i], texts[i] = text, message or text
    C.eng_backward_abort()
  end
  engine.device("cpu")
  if seen[1] ~= seen[2] then
    bug(("cpu (%s) and reference differ on %s%s\n  cpu:       %s\n  reference: %s"):format(isa,
      describe(name, inputs, ints, floats),
      precision and " under " .. precision or "", texts[1], texts[2]))
  end
end

-- Operations that are bit-identical on every device: they round at most once, or their definition
-- fixes the order of sums.
local EXACT = {}
for name in ("add sub mul maximum minimum eq ne lt le gt ge neg abs relu contiguous cast where " ..
  "clamp concat gather index_select embedding argmax argmin "
  .. "topk max min reshape permute expand slice split dequantize mx_quantize mx_dequantize "
  .. "hadamard mx_matmul nf4_quantize nf4_dequantize"
  ):gmatch("%a[%w_]*") do
    EXACT[name] = true
  end
-- Operations that read values kept by a forward pass. The plans invent these values, so inputs may
-- contradict each other, and each device may read different inputs.
local KEPT = { cross_entropy_grad = true, layer_norm_grad = true, rms_norm_grad = true,
  attention_grad = true, extreme_grad = true }
-- Tolerances, relative to the largest number. f64 has f32's tolerance, because inputs may be f32.
local PRECISION = { f64 = 1e-5, f32 = 1e-5, f16 = 2e-2, bf16 = 0.12, e4m3 = 0.3, e5m2 = 0.6 }

--- All elements of a tensor, in host memory, as double.
local function numbers_of(y)
  local values = ffi.new("double[?]", math.max(y.count, 1))
  if y.count > 0 then M_ffi.check(C.eng_read(values, M_ffi.dtype.f64, y.count, y)) end
  return values
end

--- Describes where the elements of one output differ, or returns nil. The tolerance is relative to
--- the largest finite element, or to `least` where that is larger.
local function difference(want, got, n, tolerance, least)
  local top = least
  for i = 0, n - 1 do
    local size = math.abs(want[i])
    if size < math.huge and size > top then top = size end
  end
  for i = 0, n - 1 do
    local a, b = want[i], got[i]
    if a ~= b and (a == a or b == b) and not (math.abs(a - b) <= tolerance * top) then
      return ("element %d of %d: reference %.9g, %s %.9g"):format(i, n, a, CARD, b)
    end
  end
end

--- Runs the same call on the reference and on the card, each with its own copy of the inputs, if
--- the card has a kernel.
local function compare_card(name, number)
  if M_ffi.op[name] and not C.eng_op_supported(CARD, M_ffi.op[name]) then return end
  local spoils, recorded, after = one_of { 0, 0, 0, 1, 1, 2, 4 }, chance(40), draw(2 ^ 20)
  local precision = chance(25) and one_of { "fp16", "bf16" } or nil
  local random = made.state
  local seen, texts, values, shown, lacking = {}, {}, {}, nil, false
  for i, device in ipairs { "reference", CARD } do
    engine.device(device)
    engine.seed(number)
    made.state, made.odd = random, false
    local inputs, ints, floats, n_out = plans[name]()
    ints, floats = ints or {}, floats or {}
    for _ = 1, spoils do spoil(inputs, ints, floats) end
    if recorded then
      for _, x in ipairs(inputs) do
        if x and chance(70) then pcall(x.requires_grad, x, true) end
      end
    end
    shown = describe(name, inputs, ints, floats)
    made.state = after
    local text, results, no_memory, message = attempt(function()
      local function run() return M_ffi.run(name, inputs, ints, floats, n_out) end
      local outputs = precision and { engine.autocast(precision, run) } or { run() }
      engine.synchronize()   -- an error that a kernel reports later
      return unpack(outputs, 1, table.maxn(outputs))
    end)
    if results then
      values[i] = {}
      for k = 2, table.maxn(results) do
        local y = results[k]
        if y and y.count < 1e6 then
          values[i][k] = { numbers = numbers_of(y), n = y.count, dtype = y.dtype }
        end
      end
      if recorded then
        local more, _, out_of, problem = attempt(function()
          backward(results[2])
          engine.synchronize()
        end)
        text, no_memory, message = text .. " backward " .. more, no_memory or out_of, problem
        for _, x in ipairs(inputs) do
          local good, grad = pcall(function() return x and x.grad end)
          if good and grad then
            text = text .. " " .. grad.dtype .. tensor.shape_text(grad.shape)
          end
        end
      end
    end
    lacking = lacking or no_memory
    seen[i], texts[i] = text, message or text
    C.eng_backward_abort()
  end
  if lacking then return end
  local under = precision and " under " .. precision or ""
  if seen[1] ~= seen[2] then
    bug(("reference and %s differ on %s%s\n  reference: %s\n  %s: %s"):format(CARD, shown, under,
      texts[1], CARD, texts[2]))
  end
  if not values[1] or KEPT[name] or not EXACT[name] and (made.odd or spoils > 0) then return end
  for k, one in pairs(values[1]) do
    local tolerance = EXACT[name] and 0 or precision
      and PRECISION[precision == "fp16" and "f16" or "bf16"] or PRECISION[one.dtype] or 0
    -- Attention's entropy, its third output, is a difference of numbers near 1.
    local least = name == "attention" and k == 4 and 1 or 0
    local text = difference(one.numbers, values[2][k].numbers, one.n, tolerance, least)
    if text then
      bug(("reference and %s differ on %s%s\n  output %d (%s), %s"):format(CARD, shown, under,
        k - 1, one.dtype, text))
    end
  end
end

--- Passes a call structure with random fields to the core.
local function garbage()
  ffi.fill(call, ffi.sizeof(call))
  local function number(most)
    return chance(60) and draw(most)
      or tonumber(one_of(WILD_INTS)) % 2 ^ 31 - (chance(20) and 2 ^ 31 or 0)
  end
  call.op, call.n_in, call.n_out = number(tonumber(C.ENG_OP_COUNT)), number(18), number(10)
  for k = 0, 15 do
    if chance(70) then
      call["in"][k] = chance(80) and any(shape_of(0, 4)) or M_ffi.Tensor(draw(5000), draw(4))
    end
  end
  for k = 0, 13 do call.ints[k] = chance(70) and draw(5) or one_of(WILD_INTS) end
  for k = 0, 3 do call.floats[k] = one_of(WILD_FLOATS) end
  local failed = C.eng_run(call) ~= 0 or C.eng_synchronize() ~= 0
  if failed and #M_ffi.message() < 8 then bug("no message") end
end

-- ------------------------------------------------------------------ methods with any arguments

local names = {}
for name in pairs(tensor.methods) do names[#names + 1] = name end
table.sort(names)

local function argument()
  local kind = draw(12)
  if kind < 4 then return any(shape_of(0, 4))
  elseif kind < 7 then return draw(6) - 2
  elseif kind == 7 then return one_of(WILD_FLOATS)
  elseif kind == 8 then
    return one_of { "f16", "f64", "i32", "bool", "tanh", "", "nonsense", {}, { 1 }, { 2, -1 },
      { "x" }, { -3, 1e18 }, print }
  elseif kind == 9 then return one_of { true, false }
  elseif kind == 10 then return shape_of(0, 4)
  end
  return nil
end

local FACTORIES = { "tensor", "zeros", "ones", "full", "rand", "randn", "randint", "arange",
  "concat", "stack", "attention", "cross_entropy", "mse" }

local function method()
  local name, f, shown
  if chance(85) then
    name = one_of(names)
    f = tensor.methods[name]
  else
    name = one_of(FACTORIES)
    f = engine[name]
  end
  local arguments = {}
  for k = 1, 5 do arguments[k] = argument() end
  if chance(90) and tensor.methods[name] == f then arguments[1] = any(shape_of(0, 4)) end
  if chance(30) and tensor.is_tensor(arguments[1]) then
    pcall(arguments[1].requires_grad, arguments[1], true)
  end
  shown = arguments[1]
  local good, y = pcall(f, unpack(arguments, 1, 1 + draw(5)))
  if not good and (type(y) ~= "string" or #y < 4) then
    bug("an error that is not a string of at least 4 bytes:", name, tostring(y))
  end
  if good and tensor.is_tensor(y) then
    local alive, count = pcall(function() return y.count end)
    if alive and count < 1e5 then
      local told, problem = pcall(tostring, y)
      -- The card reports some errors only on synchronization.
      if not told and not (CARD and type(problem) == "string") then error(problem, 0) end
      if chance(30) then pcall(backward, y) end
    end
  end
  C.eng_synchronize()   -- errors still pending belong to this call
  return shown
end

-- ------------------------------------------------------------------ the rounds

local function used(name)
  local row = engine.memory()[name]
  return row and row.used or 0
end

local function round(i)
  made.state = (seed * 7919 + i * 104729) % 2 ^ 31
  draw(2)
  if CARD then engine.device(CARD) end
  engine.seed(i)
  engine.begin_step()
  for _ = 1, 1 + draw(3) do
    local kind = draw(10)
    if kind < 7 then
      local name = one_of(M_ffi.op_names)
      if CARD then compare_card(name, i)
      else
        local inputs, ints, floats, n_out = plans[name]()
        ints, floats = ints or {}, floats or {}
        for _ = 1, one_of { 0, 0, 1, 1, 2, 4 } do spoil(inputs, ints, floats) end
        compare(name, inputs, ints, floats, n_out)
      end
    elseif kind < 9 then
      method()
    else
      garbage()
    end
  end
  stale = engine.zeros(2)
  engine.end_step()
  if C.eng_tape_length() ~= 0 then bug("operations stayed on the tape") end
  for _, arena in ipairs { "step", "scratch", CARD and "cuda step", CARD and "cuda scratch" } do
    if used(arena) ~= 0 then
      bug(("%d bytes of the %s arena stayed in use"):format(used(arena), arena))
    end
  end
end

engine.memory { limit = 192 * 2 ^ 20 }
stale = engine.zeros(1)
local kept = used("kept")
local from, done = C.eng_clock(), 0
while done < rounds and C.eng_clock() - from < seconds do
  local i = first + done
  local good, problem = xpcall(round,
    function(e) return type(e) == "table" and e or debug.traceback(tostring(e), 2) end, i)
  if not good then
    io.stderr:write(("round %d, seed %d: %s\n  repeat: engine spec/fuzz/ops.lua 600 %d %d " ..
      "1\n"):format(i, seed,
      type(problem) == "table" and problem.bug or problem, seed, i))
    os.exit(1)
  end
  done = done + 1
  if used("kept") > kept + 2 ^ 20 then   -- only the method :keep() may keep a tensor
    kept = used("kept")
  end
end
print(("operations: %d rounds, seed %d, %s"):format(done, seed, CARD or table.concat(isas, " ")))
