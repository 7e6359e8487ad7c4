-- Numbers that a script publishes for policies, by name: engine.signal(name, value). The trainer
-- reads them at each step.
return {}
