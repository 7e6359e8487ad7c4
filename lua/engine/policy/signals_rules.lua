-- How the values of a signal on several ranks become one number, by its name: "mean", "max" or
-- "sum".
return {}
