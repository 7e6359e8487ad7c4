#compdef engine
# Completes engine's command line in zsh. The names of commands, options and policies come from
# engine itself, the names of runs from the folder runs/.
local -a commands policies options runs
if (( CURRENT == 2 )); then
  commands=(${(f)"$(engine help 2>/dev/null | sed -n 's/^  engine \([a-z]*\)   *\(.*\)/\1:\2/p')"})
  _describe command commands
  _files -g '*.lua'
elif [[ $PREFIX == policy=* || $words[CURRENT-1] == --policy ]]; then
  policies=(${(f)"$(engine policies 2>/dev/null | sed -n 's/^  \([a-z_0-9]*\)   *\(.*\)/\1:\2/p')"})
  [[ $PREFIX == policy=* ]] && compset -P 'policy='
  _describe policy policies
  _files
elif [[ $PREFIX == -* && $words[2] =~ '^[a-z]+$' && ! -e $words[2] ]]; then
  options=(${(fu)"$(engine $words[2] --help 2>/dev/null | grep -o -e '--[a-z_]\+')"})
  _describe option options
elif [[ $words[2] == (attach|export|plot|replay|report|tune|watch) && $words[CURRENT-1] != --* ]]; then
  runs=(runs/*(N:t))
  _describe run runs
  _files
else
  _files
fi
