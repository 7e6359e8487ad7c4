-- What may be asked of a run between two steps: swaps, and by those who are attached a pause, other settings, an end.
local M = {}
local Control = {}
Control.__index = Control
function M.new(trainer) return setmetatable({ trainer = trainer }, Control) end
function Control:open() end
function Control:close() end
function Control:between() self.trainer.swaps:between() end
function Control:state() end
function Control:restore() end
return M
