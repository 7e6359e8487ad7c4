-- A tensor as text, for tostring. Never raises: if the tensor is stale or cannot be read, the text
-- has the error message. Called by tensor.lua.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"

local ffi, C, huge = M_ffi.ffi, M_ffi.C, math.huge
-- dtypes without inf and nan
local WHOLE = { u8 = true, i8 = true, i16 = true, i32 = true, i64 = true }
local MOST = 2 ^ 26   -- the most elements; larger tensors are not read
local info_buffer = ffi.new("eng_tensor_info")

local function number_text(v, dtype)
  if dtype == "bool" then return v ~= 0 and "true" or "false" end
  if v ~= v then return "nan" end
  if v == huge or v == -huge then return v > 0 and "inf" or "-inf" end
  if v == 0 and 1 / v < 0 then return "-0" end
  if v % 1 == 0 and math.abs(v) < 1e7 then return ("%d"):format(v) end
  return ("%.4g"):format(v)
end

--- Returns a tensor as text: its dtype, shape and device, the smallest and largest finite element
--- and their mean (not of bool), the counts of inf and nan (not of integers), and the first rows
--- and columns. Leaves out the elements if there are more than MOST.
return function(x)
  if C.eng_info(info_buffer, x) ~= 0 then return "tensor (" .. M_ffi.message() .. ")" end
  local shape, dtype = arguments.shape_table(info_buffer), M_ffi.dtype_name[info_buffer.dtype]
  local count, grad = tonumber(info_buffer.count), info_buffer.requires_grad ~= 0
  local head = ("%s %s %s%s"):format(dtype, arguments.shape_text(shape), x.device,
    grad and " requires_grad" or "")
  if count == 0 then return head .. " (empty)" end
  if info_buffer.divided ~= 0 then return head .. " (divided among the ranks)" end
  local room, values = pcall(ffi.new, "double[?]", count <= MOST and count or 0)
  if count > MOST or not room then
    return head .. " (too many elements to summarize; hint: print a part, such as x:slice(1, 1, 8))"
  end
  if C.eng_read(values, M_ffi.dtype.f64, count, x) ~= 0 then
    return ("%s (%s)"):format(head, M_ffi.message())
  end
  if count == 1 and #shape == 0 then
    return ("%s: %s"):format(head, number_text(values[0], dtype))
  end
  local least, most, sum, finite, inf, nan = huge, -huge, 0, 0, 0, 0
  for i = 0, count - 1 do
    local v = values[i]
    if v ~= v then nan = nan + 1
    elseif v == huge or v == -huge then inf = inf + 1
    else
      finite, sum = finite + 1, sum + v
      if v < least then least = v end
      if v > most then most = v end
    end
  end
  local lines = { head }
  if dtype ~= "bool" then
    lines[1] = head .. (finite > 0 and ("  min %s max %s mean %s"):format(number_text(least),
      number_text(most), number_text(sum / finite)) or "")
      .. (WHOLE[dtype] and "" or ("  inf %d nan %d"):format(inf, nan))
  end
  local columns = shape[#shape]
  local rows = count / columns
  for r = 0, math.min(rows, 6) - 1 do
    local row = {}
    for c = 0, math.min(columns, 8) - 1 do
      row[#row + 1] = ("%10s"):format(number_text(values[r * columns + c], dtype))
    end
    lines[#lines + 1] = table.concat(row, " ") .. (columns > 8 and "  ..." or "")
  end
  if rows > 6 then lines[#lines + 1] = "       ..." end
  return table.concat(lines, "\n")
end
