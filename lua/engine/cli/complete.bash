# Completes engine's command line in bash. The names of commands, options and policies come from
# engine itself, the names of runs from the folder runs/.
_engine()
{
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
  local commands policies options runs
  COMPREPLY=()
  if [[ $COMP_CWORD -eq 1 ]]; then
    commands=$(engine help 2>/dev/null | sed -n 's/^  engine \([a-z]*\)   *.*/\1/p')
    mapfile -t COMPREPLY < <(compgen -W "$commands -e -i -l -v -j -O -E --help" -- "$word"; compgen -f -- "$word")
  elif [[ $before == "=" && ${COMP_WORDS[COMP_CWORD - 2]} == policy || $before == --policy ]]; then
    policies=$(engine policies 2>/dev/null | sed -n 's/^  \([a-z_0-9]*\)   *.*/\1/p')
    mapfile -t COMPREPLY < <(compgen -W "$policies" -- "$word"; compgen -f -- "$word")
  elif [[ $word == -* && ${COMP_WORDS[1]} =~ ^[a-z]+$ && ! -e ${COMP_WORDS[1]} ]]; then
    options=$(engine "${COMP_WORDS[1]}" --help 2>/dev/null | grep -o -e '--[a-z_]\+' | sort -u)
    mapfile -t COMPREPLY < <(compgen -W "$options" -- "$word")
  elif [[ ${COMP_WORDS[1]} =~ ^(attach|export|plot|replay|report|tune|watch)$ && $before != --* ]]; then
    runs=$(ls runs 2>/dev/null)
    mapfile -t COMPREPLY < <(compgen -W "$runs" -- "$word"; compgen -f -- "$word")
  else
    mapfile -t COMPREPLY < <(compgen -f -- "$word")
  fi
}
complete -o filenames -F _engine engine
