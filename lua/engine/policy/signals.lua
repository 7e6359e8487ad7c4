-- Numbers that a script publishes for policies, by name: engine.signal(name, value). Read by the trainer at each step.
return {}
