-- The names that policies use, as the core lists them (core/record.def and the fields of a verdict
-- in core/policy/policy_verdict.c): a list of { name =, need = the ENG_NEED_* that a policy must
-- announce, or 0, combine = ENG_COMBINE_*, record =, tensor =, verdict =, listed = }. The last four
-- are booleans: the name is a field of the record, of a tensor's or group's statistics or of a
-- verdict, or an entry of `needs`. A name of the record and of a verdict has two elements. Used by
-- class_scaler.lua, scaler.lua and docs/types.lua.
local M_ffi = require "engine.base.ffi"

local C, ffi = M_ffi.C, M_ffi.ffi
local list, row = {}, ffi.new("eng_policy_name")
while C.eng_policy_name_get(row, #list) do
  list[#list + 1] = { name = ffi.string(row.name), need = row.need, combine = row.combine,
    record = row.record, tensor = row.tensor, verdict = row.verdict, listed = row.listed }
end
return list
