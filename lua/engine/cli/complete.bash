# Completion of engine's command line for bash. Commands and policies come from engine itself.
_engine()
{
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
  local commands policies
  COMPREPLY=()
  if [[ $COMP_CWORD -eq 1 ]]; then
    commands=$(engine help 2>/dev/null | sed -n 's/^  engine \([a-z]*\)   *.*/\1/p')
    mapfile -t COMPREPLY < <(compgen -W "$commands -e -i -l -v -j -O -E --help" -- "$word"; compgen -f -- "$word")
  elif [[ $before == "=" && ${COMP_WORDS[COMP_CWORD - 2]} == policy || ${COMP_WORDS[1]} == replay ]]; then
    policies=$(engine policies 2>/dev/null | sed -n 's/^  \([a-z_0-9]*\)   *.*/\1/p')
    mapfile -t COMPREPLY < <(compgen -W "$policies" -- "$word"; compgen -f -- "$word")
  else
    mapfile -t COMPREPLY < <(compgen -f -- "$word")
  fi
}
complete -o filenames -F _engine engine
