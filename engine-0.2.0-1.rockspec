rockspec_format = "3.0"
package = "engine"
version = "0.2.0-1"
source = { url = "git+https://localhost/engine.git", tag = "v0.2.0" }
description = {
  summary = "A Lua-scriptable training engine for low-precision numerics",
  detailed = [[
Trains models in fp32, bf16, fp16 and FP8 on CPU and CUDA. Models, training loops and loss-scaling
policies are Lua. Needs LuaJIT, oneDNN, SQLite, utf8proc and libedit with their headers.]],
  license = "MIT",
}
dependencies = { "lua == 5.1", "lua-cjson" }
supported_platforms = { "linux" }
build = {
  type = "make",
  build_target = "all",
  install_target = "install",
  install_variables = { PREFIX = "$(PREFIX)", LUADIR = "$(LUADIR)" },
}
