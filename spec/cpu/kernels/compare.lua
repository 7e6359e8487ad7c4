-- Runs one call of an operation on the reference and on the fast kernels of every instruction set
-- of this machine (or the one named by ENGINE_ISA), and compares the outputs element by element:
--   NaN where the reference has NaN; infinities where it has them (overflow is a rounding: a value
--   within the tolerance of the threshold may fall on either side of it); and otherwise
--   |got - want| <= ulp * (unit in the last place of `want` in the output's format)
--                   + eps * 2^-24 * bound
--
-- A call is a table: inputs (false: absent), ints, floats, outputs (their number), and
--   ulp       units in the last place allowed; f16 and bf16 use at most 1, because rounding of f32
--             arithmetic may move a value to the neighbour in a narrower format
--   ulp_low   the units allowed for f16 and bf16, if they differ from `ulp`
--   eps       factor of 2^-24 times `bound`
--   bound     the magnitude at which the f32 arithmetic inside works: the name of a function of
--             `bounds` below, or function(name, call, want) -> function(output, element) ->
--             magnitude
--   flush     an additional absolute difference, for processors that treat subnormals as zero
--   threads   the library's order of sums may depend on the number of threads: true, or "AMX" for
--             products of bf16 on a processor with AMX (oneDNN; seen with version 3.12)
--   zeros     the signs of zeros must agree, too
--   card      on a card in f16 and bf16: replaces eps, in the format's own units instead of 2^-24,
--             for kernels that round intermediate values for the matrix units
--   pairs     in bf16, `card` also applies on a processor that multiplies pairs of bf16
--   fails     the reference and the kernels raise an error that matches this pattern
--   note      a text that error messages include
local v = require "spec.cpu.kernels.values"
local engine = require "engine.base.ffi"
local C = engine.C
local FORMATS, largest, ulp_of = v.FORMATS, v.largest, v.ulp_of
local tensor_of, shape_of, dtype_of, values_of = v.tensor_of, v.shape_of, v.dtype_of, v.values_of
local abs, inf = math.abs, math.huge

local M = {}

-- ------------------------------------------------------------------ devices

--- The instruction sets to test, the current one first.
local function instruction_sets()
  local now = engine.string(C.eng_cpu_isa(nil))
  local sets = { now }
  if not os.getenv("ENGINE_ISA") then
    for _, name in ipairs { "avx512", "avx2", "plain" } do
      if name ~= now and C.eng_cpu_isa(name) ~= nil then sets[#sets + 1] = name end
    end
    C.eng_cpu_isa(now)
  end
  return sets
end

-- ENGINE_TEST_DEVICE=cuda tests the kernels of the card instead; the reference still runs on the
-- host.
local CARD = os.getenv("ENGINE_TEST_DEVICE")
local SETS = CARD and { CARD } or instruction_sets()
M.SETS, M.CARD = SETS, CARD
local AMX = engine.string(C.eng_cpu_bf16()) == "AMX"
-- the instruction set that multiplies pairs of bf16, or false
local PAIRS = not CARD and engine.string(C.eng_cpu_bf16()) == "pairs" and SETS[1]
M.THREADS = C.eng_threads(0)

local function run(name, call)
  return { pcall(engine.run, name, call.inputs, call.ints, call.floats, call.outputs or 1) }
end

local function all_bf16(inputs)
  for _, x in ipairs(inputs) do
    if x and v.info_of(x).dtype ~= engine.dtype.bf16 then return false end
  end
  return true
end

--- Results on the reference: true and the outputs, or false and the message.
local function on_reference(name, call)
  engine.check(C.eng_device_set("reference"))
  local results = run(name, call)
  engine.check(C.eng_device_set("cpu"))
  return results
end

--- Results on the card, copied to the host. Also collects errors that a kernel reports late.
local function on_card(name, call)
  local inputs = {}
  engine.check(C.eng_device_set(CARD))
  for k, x in ipairs(call.inputs) do inputs[k] = x and v.on_device(x, CARD) end
  local results = run(name, { inputs = inputs, ints = call.ints, floats = call.floats,
    outputs = call.outputs })
  if C.eng_synchronize() ~= 0 and results[1] then results = { false, engine.message() } end
  engine.check(C.eng_device_set("cpu"))
  for k = 2, table.maxn(results) do
    if results[1] and results[k] then results[k] = v.on_device(results[k], "cpu") end
  end
  return results
end

local function on_cpu(set, name, call, threads)
  if CARD then return on_card(name, call) end
  if #SETS > 1 then C.eng_cpu_isa(set) end
  C.eng_threads(threads)
  local results = run(name, call)
  C.eng_threads(M.THREADS)
  if #SETS > 1 then C.eng_cpu_isa(SETS[1]) end
  return results
end

engine.ffi.cdef "int memcmp(const void *, const void *, size_t);"

--- True if two tensors have the same bytes.
local function same_bytes(a, b)
  local one, two = v.info_of(a), v.info_of(b)
  local bytes = tonumber(one.count) * C.eng_dtype_size(one.dtype)
  return engine.ffi.C.memcmp(one.data, two.data, bytes) == 0
end

-- ------------------------------------------------------------------ bounds

local bounds = {}

--- The operation's outputs, in double, for the absolute values of its float inputs (0 for
--- non-finite values).
function M.absolute_sums(name, call)
  local inputs = {}
  for k, x in ipairs(call.inputs) do
    inputs[k] = x
    if x and FORMATS[dtype_of(x)] then
      local values, n = values_of(x)
      for i = 0, n - 1 do
        local magnitude = abs(values[i])
        values[i] = magnitude < inf and magnitude or 0
      end
      inputs[k] = tensor_of("f64", shape_of(x), values)
    end
  end
  local results = on_reference(name, { inputs = inputs, ints = call.ints, floats = call.floats,
    outputs = call.outputs })
  assert(results[1], results[2])
  return { unpack(results, 2, table.maxn(results)) }
end

--- The magnitude of a kernel's sums: its absolute_sums.
function bounds.sums(name, call)
  local list = {}
  for k, x in pairs(M.absolute_sums(name, call)) do list[k] = values_of(x) end
  return function(output, i) return list[output][i] end
end

--- The magnitude of the same element of input number `bound_input`, which has the output's shape.
function bounds.input(_, call)
  local values = values_of(call.inputs[call.bound_input or 1])
  return function(_, i) return abs(values[i]) end
end

--- The largest finite magnitude of the whole expected output.
function bounds.largest(_, _, want)
  local list = {}
  for k = 2, table.maxn(want) do
    if want[k] then
      local values, n = values_of(want[k])
      list[k - 1] = M.largest_of(values, 0, n - 1)
    end
  end
  return function(output) return list[output] end
end

--- The largest finite magnitude among values[first..last].
function M.largest_of(values, first, last)
  local top = 0
  for i = first, last do
    local magnitude = abs(values[i])
    if magnitude > top and magnitude < inf then top = magnitude end
  end
  return top
end

--- The largest finite magnitude of each row of a matrix, from row 0; also the length of the rows.
function M.row_tops(x)
  local values, n = values_of(x)
  local shape = shape_of(x)
  local columns = shape[#shape] or 1
  local tops = {}
  for row = 0, columns > 0 and n / columns - 1 or -1 do
    tops[row] = M.largest_of(values, row * columns, (row + 1) * columns - 1)
  end
  return tops, columns
end

-- ------------------------------------------------------------------ comparing

local function text_of(name, call)
  local parts = {}
  for k, x in ipairs(call.inputs) do
    parts[k] = x and ("%s [%s]"):format(dtype_of(x), table.concat(shape_of(x), " x ")) or "-"
  end
  return ("%s(%s) ints {%s} floats {%s} %s"):format(name, table.concat(parts, ", "),
    table.concat(call.ints or {}, ", "), table.concat(call.floats or {}, ", "), call.note or "")
end

--- The first element out of tolerance, or nil.
local function first_difference(call, output, dtype, expected, actual, n, bound, set)
  local format = FORMATS[dtype]
  local low = dtype == "f16" or dtype == "bf16"
  local ulps = call.ulp or 0
  if low then ulps = call.ulp_low or math.min(ulps, 1) end
  local eps = bound and (call.eps or 0) * 2 ^ -24 or 0
  local rounds = M.CARD and low or call.pairs and dtype == "bf16" and set == PAIRS
  if bound and rounds and call.card then eps = call.card * 2 ^ -(format.digits + 1) end
  for i = 0, n - 1 do
    local a, b = expected[i], actual[i]
    local fine
    if a ~= a or b ~= b then
      fine = a ~= a and b ~= b
    elseif a == b then
      fine = a ~= 0 or not call.zeros or 1 / a == 1 / b
    elseif format then
      local top = largest(format)
      local function shrink(x) return abs(x) == inf and (x > 0 and top or -top) or x end
      if abs(a) == inf or abs(b) == inf then a, b = shrink(a), shrink(b) end
      -- One was infinite. Values at least half a unit above the largest number overflow.
      if abs(a) == top and abs(b) == top and a == b then
        fine = (ulps > 0 or eps > 0)
      else
        fine = abs(a - b) <= ulps * ulp_of(a, format) + (eps > 0 and eps * bound(output, i) or 0) +
          (call.flush or 0)
      end
    end
    if not fine then return i end
  end
end

local function fail(name, call, set, output, i, n, expected, actual)
  local from = {}
  for k, x in ipairs(call.inputs) do
    if x then
      local values, count = values_of(x)
      if count == n then from[#from + 1] = ("in%d %.9g"):format(k, values[i]) end
    end
  end
  error(("%s: %s\n  output %d element %d of %d: expected %.9g, got %.9g (%s)"):format(set,
    text_of(name, call), output, i, n, expected[i],
    actual[i], table.concat(from, ", ")), 0)
end

--- Raises an error unless an operation gives, on the reference and on every device under test, the
--- same bytes as other operations run in sequence. in_steps(inputs), called with the inputs on the
--- current device, returns a list of the expected outputs.
function M.same_as(name, call, in_steps)
  local function both(where, inputs)
    local good, message = pcall(function()
      local got = { engine.run(name, inputs, call.ints, call.floats, call.outputs) }
      local want = in_steps(inputs)
      for k = 1, call.outputs do
        assert((want[k] or nil) == nil == (got[k] == nil), "an output exists on one side only")
        if got[k] then
          assert(dtype_of(want[k]) == dtype_of(got[k])
            and table.concat(shape_of(want[k]), " ") == table.concat(shape_of(got[k]), " "),
            "formats or shapes differ")
          local a, b = v.on_device(want[k], "cpu"), v.on_device(got[k], "cpu")
          if not same_bytes(a, b) then
            local one, two, n = v.info_of(a), v.info_of(b),
              tonumber(v.info_of(a).count) * C.eng_dtype_size(v.info_of(a).dtype)
            local p, q = engine.ffi.cast("uint8_t *", one.data),
              engine.ffi.cast("uint8_t *", two.data)
            local i = 0
            while p[i] == q[i] do i = i + 1 end
            error(("output %d, byte %d of %d: in steps %d, at once %d"):format(k, i, n, p[i], q[i]),
              0)
          end
        end
      end
    end)
    engine.check(C.eng_device_set("cpu"))
    if not good then error(("%s: %s\n  %s"):format(where, text_of(name, call), message), 0) end
  end
  engine.check(C.eng_device_set("reference"))
  both("reference", call.inputs)
  if CARD then
    local inputs = {}
    engine.check(C.eng_device_set(CARD))
    for k, x in ipairs(call.inputs) do inputs[k] = x and v.on_device(x, CARD) end
    return both(CARD, inputs)
  end
  for _, set in ipairs(SETS) do
    if #SETS > 1 then C.eng_cpu_isa(set) end
    for _, threads in ipairs { 1, 3 } do
      C.eng_threads(threads)
      both(set, call.inputs)
    end
  end
  C.eng_threads(M.THREADS)
  if #SETS > 1 then C.eng_cpu_isa(SETS[1]) end
end

local calls = 0

--- Raises an error unless every instruction set agrees with the reference on this call. Every fifth
--- call and the large ones also run with three threads, which must not change a bit.
function M.check(name, call)
  local want = on_reference(name, call)
  if call.fails then
    assert(not want[1], text_of(name, call) .. ": the reference accepted it")
    assert(tostring(want[2]):find(call.fails),
      ("%s: '%s' is not in the message: %s"):format(text_of(name, call), call.fails,
      tostring(want[2])))
  else
    assert(want[1], want[2])
  end
  local bound, lists = nil, {}    -- of the reference's outputs; computed where bytes differ
  calls = calls + 1
  local large = false
  for _, x in ipairs(call.inputs) do large = large or (x and v.info_of(x).count > 16384) end
  for _, set in ipairs(SETS) do
    local got = on_cpu(set, name, call, 1)
    local library = call.threads == true
      or call.threads == "AMX" and AMX and all_bf16(call.inputs)
    if got[1] and not library and (calls % 5 == 0 or large) then
      local again = on_cpu(set, name, call, 3)
      for k = 2, table.maxn(got) do
        if got[k] and not same_bytes(got[k], again[k]) then
          error(("%s: %s: output %d depends on the number of threads"):format(set,
            text_of(name, call), k - 1), 0)
        end
      end
    end
    if call.fails then
      assert(not got[1], set .. ": " .. text_of(name, call) .. ": the fast kernel accepted it")
      assert(tostring(got[2]):find(call.fails),
             ("%s: %s: '%s' is not in the message: %s"):format(set, text_of(name, call), call.fails,
               tostring(got[2])))
    else
      assert(got[1], got[2])
      for k = 2, math.max(table.maxn(want), table.maxn(got)) do
        assert((want[k] == nil) == (got[k] == nil),
          ("%s: %s: output %d exists on one device only"):format(set, text_of(name, call), k - 1))
        if want[k] then
          assert(dtype_of(want[k]) == dtype_of(got[k]), "dtypes differ")
          assert(table.concat(shape_of(want[k]), " ") == table.concat(shape_of(got[k]), " "),
            "shapes differ")
          if not same_bytes(want[k], got[k]) then
            bound = bound or call.bound and (bounds[call.bound] or call.bound)(name, call, want)
            lists[k] = lists[k] or values_of(want[k])
            local actual, n = values_of(got[k])
            local i = first_difference(call, k - 1, dtype_of(want[k]), lists[k], actual, n, bound,
              set)
            if i then fail(name, call, set, k - 1, i, n, lists[k], actual) end
          end
        end
      end
    end
  end
end

return M
