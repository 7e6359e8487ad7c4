-- How signals (signals.lua) of several ranks become one number, by name: "mean", "max" or "sum".
return {}
