# The caller's functions for Bash: `cloche_host NAME [JSON]` prints the result as JSON, or the error on standard error.
#
# Frames are those of `init.wire`: length, number, kind (nine bytes), then JSON. Calls go to descriptor 5, answers come on
# 6. There is one call at a time: a lock lets subshells wait for each other.
__cloche_lock=$(mktemp -u "${TMPDIR:-/tmp}/.cloche-host.XXXXXX")
__cloche_number=0

__cloche_bytes() {  # the header of a frame: length, number, kind
  local LC_ALL=C part shift text=
  for part in "$1" "$2"; do
    for shift in 24 16 8 0; do
      printf -v text '%s\\x%02x' "$text" $(( (part >> shift) & 255 ))
    done
  done
  printf -v text '%s\\x%02x' "$text" "$3"
  printf "$text"
}

__cloche_text() {  # JSON of a text
  local LC_ALL=C text=${1//\\/\\\\}
  text=${text//\"/\\\"}
  text=${text//$'\n'/\\n}
  text=${text//$'\r'/\\r}
  text=${text//$'\t'/\\t}
  printf '"%s"' "$text"
}

cloche_host() {
  local LC_ALL=C name=$1 data=${2:-"{}"} body head answer number
  body="{\"call\":$(__cloche_text "$name"),\"data\":$data}"
  number=$(( (BASHPID << 12 | __cloche_number++ & 4095) & 0xffffffff ))
  {
    flock 8
    ( trap '' INT QUIT; __cloche_bytes "${#body}" "$number" 1; printf '%s' "$body" ) >&5  # all, or nothing
    while :; do
      # What an interrupt left of an answer is text: it ends before the zero byte with which the next header begins.
      if ! IFS= read -r -d '' -u 6 answer || head=($(head -c 8 <&6 | od -An -v -tu1)) && (( ${#head[@]} < 8 )); then
        answer="the caller takes no more calls from this program"
        break
      fi
      (( head[7] == 0 || head[7] == 7 )) || continue
      answer=$(head -c $(( head[0] << 16 | head[1] << 8 | head[2] )) <&6)
      (( head[7] == 7 && (head[3] << 24 | head[4] << 16 | head[5] << 8 | head[6]) == number )) && break
    done
  } 8>"$__cloche_lock"
  case $answer in
    '{"value":'*) answer=${answer#'{"value":'}; printf '%s\n' "${answer%\}}" ;;
    *) printf '%s\n' "$answer" >&2; return 1 ;;
  esac
}
