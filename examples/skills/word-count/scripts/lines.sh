# Count the lines of files.
for name in "$@"; do
    count=0
    while IFS= read -r _; do count=$((count + 1)); done < "$name"
    echo "$count $name"
done
