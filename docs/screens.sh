#!/bin/bash
# Takes pictures of pages of the built manual, to look at:
#
#   docs/screens.sh BOOK DIR [PAGE...]
#
# BOOK is what docs/build.sh made. DIR gets PAGE-WIDTH-THEME.png for the widths 1280 and 400 and the themes light and dark.
# PAGE is a path of the book without .html; default: pages of every kind. Needs chromium.
set -euo pipefail

[ $# -ge 2 ] || { sed -n '2,/^set -/p' "$0" | sed -n 's/^# \{0,1\}//p'; exit 2; }
book=$(cd "$1" && pwd)
mkdir -p "$2"
dir=$(cd "$2" && pwd)
shift 2
pages=${*:-introduction start/c concepts/tiers howto/engine reference/specs reference/metrics reference/tool reference/c benchmarks/store glossary reference/c-api/index}
chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome) ||
    { echo "chromium is missing"; exit 1; }
profile=$(mktemp -d)
frame=$book/.screens.html
trap 'rm -rf "$profile" "$frame"' EXIT

for page in $pages; do
    [ -e "$book/$page.html" ] || { echo "no page $page"; exit 1; }
    for width in 1280 400; do
        for theme in light dark; do
            # Chromium has a minimum window width, so a frame of the wanted width shows the page.
            cat >"$frame" <<HTML
<!DOCTYPE html><meta name="color-scheme" content="light dark"><style>body { margin: 0 } iframe { border: 0; display: block }</style>
<iframe src="$page.html" width="$width" height="1600"></iframe>
HTML
            dark=1
            [ $theme = light ] || dark=0
            "$chromium" --headless --no-sandbox --disable-gpu --hide-scrollbars --allow-file-access-from-files \
                --user-data-dir="$profile" --blink-settings=preferredColorScheme=$dark \
                --window-size="$width,1600" --virtual-time-budget=5000 \
                --screenshot="$dir/${page//\//-}-$width-$theme.png" "file://$frame" >/dev/null 2>&1 ||
                { echo "chromium failed on $page"; exit 1; }
        done
    done
done
ls "$dir"
