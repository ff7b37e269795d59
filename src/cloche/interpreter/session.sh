# A live session of Bash: `bash --noprofile --norc session.sh LINK ANSWERS`, two descriptors: one to read from, and a pipe
# to write to.
#
# Theory of operation: only an interactive Bash can be interrupted in the middle of a loop and keep all it knows, so this
# script becomes one, without a terminal. Such a shell runs PROMPT_COMMAND before each line it reads; here that command is
# the session. It says how the run before it ended, reads the next one from the link and evaluates it, outside of any
# function, so that what a run declares is global. A SIGINT throws the shell back to its prompt, wherever it was, hence to
# PROMPT_COMMAND. The line it then reads is empty and made anew each time. At the prompt, standard error is nowhere, which
# hides what an interactive shell says by itself; a run has the real one. While a run goes on, the link (60), the pipe of
# answers (59) and the kept standard error (61) are closed, so that none of its processes inherit them.
#
# A run is one compound command, as a script is one file: an error that would end a script ends all of it. What would end
# the shell must not: `exit` is a function and `set -e` is watched by the ERR trap; both throw the shell back to its
# prompt. For all the ways around them, `builtin exit` for one, the EXIT trap starts the shell anew with what it knew.
#
# SIGINT to the process group interrupts a run, as in a terminal. It is not the best way: a shell that waits for a child
# may take it for the child's affair, or, once in a hundred when the children are many and short, be caught by it between
# two handlers and be lost. Surer is SIGURG to the shell alone, which everything else ignores by default, and SIGQUIT to the
# group, which the shell and its background jobs ignore. Only what ignores SIGQUIT, as a Bash script does, needs SIGINT
# after that. A SIGURG that comes when a run is on the link, but has not begun, ends that one as it begins; what was meant
# for the run before is over with the run number 0, which is none. Between two runs interrupts are ignored.

if [[ $- != *i* ]]; then
  # The given ones may have the numbers that are wanted for another: they are moved away first, to 10 and up.
  exec {__cloche_link}<&"$1" {__cloche_answers}>&"$2"
  for __cloche_given in "$@"; do exec {__cloche_given}>&-; done
  exec 59>&"$__cloche_answers" 60<&"$__cloche_link" 61>&2 62>&-
  exec {__cloche_answers}>&- {__cloche_link}<&-
  exec -a bash "$BASH" --noprofile --noediting --rcfile "$0" -i </dev/null 2>/dev/null
fi

PS1= PS2=
unset -v HISTFILE MAILCHECK
set +o history +H +m -E
shopt -s extglob # a run is read as a whole, so it could not switch this on for itself
IGNOREEOF=1000000000
__cloche_file=${BASH_SOURCE[0]} __cloche_id= __cloche_is_running= __cloche_status=
__cloche_is_hearing= __cloche_is_early=
__cloche_last=0 __cloche_code= __cloche_options=
BASH_ARGV0=/dev/stdin
# The functions of the caller that cells may call, if there are any: no interactive shell reads BASH_ENV by itself.
[[ ${BASH_ENV-} != */host_functions.sh ]] || . "$BASH_ENV"

# Before 5.1 a command of PROMPT_COMMAND cannot give SIGINT back to the shell once it was ignored. There a signal between
# two runs throws the shell back to where it is.
if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 501)); then
  __cloche_hold() { builtin trap '' INT; }
  __cloche_heed() { builtin trap - INT; }
else
  __cloche_hold() { :; }
  __cloche_heed() { :; }
fi

# End the run from wherever it is, with exit code $1.
__cloche_abort() {
  __cloche_status=$1
  __cloche_heed
  while :; do builtin kill -INT $$; done
}

# From 5.3 on, a SIGINT that meets `wait` in what a shell does at its prompt would kill the shell, were it not trapped.
if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 503)); then
  wait() {
    local code=0
    [[ $BASHPID != "$$" ]] || builtin trap '__cloche_abort 130' INT
    builtin wait "$@" || code=$?
    [[ $BASHPID != "$$" ]] || builtin trap - INT
    return "$code"
  }
fi

exit() {
  local last=$? code=0
  [[ $BASHPID == "$$" ]] || builtin exit "${@:-$last}"
  (builtin exit "${@:-$last}") || code=$?
  __cloche_abort "$code"
}

# Variables of one run alone: their values before it are kept for the run after it.
declare -A __cloche_kept=() __cloche_assigned=()
__cloche_assign() {
  unset -v "__cloche_kept[$1]"
  [[ ! -v $1 ]] || __cloche_kept[$1]=${!1}
  __cloche_assigned[$1]=1
  export "$1=$2"
}

__cloche_restore() {
  [[ -v __cloche_assigned[$1] ]] || return 0
  unset -v "__cloche_assigned[$1]"
  if [[ -v __cloche_kept[$1] ]]; then
    export "$1=${__cloche_kept[$1]}"
  else
    unset -v "$1"
  fi
}

__cloche_failed() {
  local code=$?
  [[ $- != *e* || $BASHPID != "$$" ]] || __cloche_abort "$code"
}

__cloche_return() { builtin return "$1"; }

# Say how the run ended. Without a status it never came to its end: the shell was thrown back with $1. After SIGINT that
# is 130 or, where a program was ended by a signal just before, what that one left.
__cloche_report() {
  [[ $__cloche_id ]] || return 0
  __cloche_last=${__cloche_status:-$(($1 < 128 ? $1 : 130))}
  builtin trap '' PIPE # a caller that is gone shows in the next read
  builtin printf 'done %s %s\n' "$__cloche_id" "$__cloche_last" >&59
  builtin trap - PIPE
  __cloche_id= __cloche_status=
}

# A run that came to its last line has a status already, unless what follows that line did not parse.
__cloche_conclude() {
  if (($1 == 0)); then
    __cloche_status=${__cloche_status:-0}
  else
    __cloche_status=$1
  fi
}

__cloche_leave() {
  builtin trap - EXIT
  builtin exit "$1"
}

__cloche_next() {
  local last=$? id length IFS=' ' LC_ALL=C # so that characters are bytes
  __cloche_is_running=
  __cloche_hold
  # A SIGINT that meets a subshell right after its fork throws that one back to the prompt too.
  [[ $BASHPID == "$$" ]] || __cloche_leave 130
  __cloche_report "$last"
  builtin exec 0<<<''
  __cloche_code=
  builtin read -r -u 60 id length || __cloche_leave 0
  __cloche_is_hearing=1
  IFS=
  ((length == 0)) || builtin read -r -N "$length" -u 60 __cloche_code || __cloche_leave 0
  __cloche_id=$id
  __cloche_heed
  __cloche_is_running=1 __cloche_is_hearing=
  ((id != 0)) || __cloche_is_early=
  if [[ $__cloche_is_early ]]; then
    __cloche_is_early=
    __cloche_abort 130
  fi
}

# Options come last: under some of them the rest could not be restored.
__cloche_dump() {
  builtin shopt -p
  builtin declare -f
  builtin declare -Fx
  builtin declare -p
  builtin trap -p
  builtin alias -p
  builtin set +o
}

__cloche_restart() {
  builtin exec -a bash "$BASH" --noprofile --noediting --rcfile "$__cloche_file" -i 62<<<"$(__cloche_dump)"
}

trap __cloche_failed ERR
trap 'if [[ $__cloche_is_running ]]; then
  __cloche_status=130
  builtin kill -INT $$
elif [[ $__cloche_is_hearing ]] || builtin read -t 0 -u 60; then
  __cloche_is_early=1
fi' URG
trap '__cloche_status=$? __cloche_options=$-; [[ $BASHPID == "$$" ]] && { : >&59; } 2>/dev/null && __cloche_restart' EXIT
readonly PROMPT_COMMAND='__cloche_next
builtin source /dev/stdin <<<"{ { exec </dev/null; __cloche_return $__cloche_last && :; } 2>/dev/null; $__cloche_code

{ __cloche_status=\$?; } 2>/dev/null
}" 2>&61 60>&- 61>&- 59>&-
__cloche_conclude "$?"'

if { : <&62; } 2>/dev/null; then
  IFS= read -r -d '' -u 62 __cloche_code
  exec 62<&-
  eval "$__cloche_code" 2>/dev/null
  [[ $__cloche_options != *e* ]] || set -e
else
  printf 'ready %s\n' "$BASH_VERSION" >&59
fi
