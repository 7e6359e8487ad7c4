#compdef engine
# Completion of engine's command line for zsh. Commands and policies come from engine itself.
local -a commands policies
if (( CURRENT == 2 )); then
  commands=(${(f)"$(engine help 2>/dev/null | sed -n 's/^  engine \([a-z]*\)   *\(.*\)/\1:\2/p')"})
  _describe command commands
  _files -g '*.lua'
elif [[ $PREFIX == policy=* || $words[2] == replay ]]; then
  policies=(${(f)"$(engine policies 2>/dev/null | sed -n 's/^  \([a-z_0-9]*\)   *\(.*\)/\1:\2/p')"})
  [[ $PREFIX == policy=* ]] && compset -P 'policy='
  _describe policy policies
  _files
else
  _files
fi
