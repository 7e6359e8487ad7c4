-- The optimizers and options that optim.lua and spec/train/lua_optim_spec.lua run: { name,
-- options, policy, its options }. optim.py has the same names and numbers.
local BETAS = { beta1 = 0.9, beta2 = 0.95, weight_decay = 0.1 }
local function muon(more)
  local options = { lr = 0.02, ns_dtype = "f32", beta2 = 0.95 }
  for key, value in pairs(more) do options[key] = value end
  return { "muon", options }
end
return {
  muon = muon {},
  muon_plain = muon { nesterov = false, weight_decay = 0, momentum = 0.9 },
  muon_match_rms_adamw = muon { adjust_lr = "match_rms_adamw", lr = 1e-3, adamw_lr_mul = 20 },
  muon_spectral_unclamped = muon { adjust_lr = "spectral_unclamped" },
  muon_bf16 = muon { ns_dtype = "bf16" },
  adafactor = { "adafactor", {} },
  adafactor_decay = { "adafactor", { lr = 0.05, weight_decay = 0.1, beta2_decay = -0.5, d = 1.5 } },
  stableadamw = { "stableadamw", { lr = 0.01 } },
  stableadamw_decay = { "stableadamw", { lr = 0.02, beta1 = 0.9, beta2 = 0.95,
    weight_decay = 0.1 } },
  adagc = { "adamw", { lr = 0.01, weight_decay = 0.1 }, "adagc", { warmup_steps = 30 } },
  spam = { "adam", { lr = 0.01, eps = 1e-12 }, "spam",
    { interval = 30, warmup_epoch = 10, threshold = 20, grad_accu_steps = 3 } },
  stable_spam = { "adamw", { lr = 0.01, weight_decay = 0.1 }, "stable_spam" },
  stable_spam_reset = { "adamw", { lr = 0.01, weight_decay = 0.1 }, "stable_spam",
    { interval = 30 } },
  lamb = { "lamb", { lr = 0.01 } },
  lamb_decay = { "lamb", { lr = 0.01, weight_decay = BETAS.weight_decay, beta2 = BETAS.beta2 } },
}
