-- For each signal's name, how its values on several ranks become one number: "mean", "max" or
-- "sum".
return {}
