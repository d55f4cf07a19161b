# Shared by the scripts beside it, which are run from the repository's root: finding Python, and making
# virtual environments that are complete or made anew.

fail() {
    echo "outrider: $*" >&2
    exit 1
}

say() {
    echo "outrider: $*" >&2
}

fits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null
}

# Sets `python`: $PYTHON where it is given, else the first that fits.
find_python() {
    [ "$(uname -sm)" = "Linux x86_64" ] || fail "this runs on Linux x86-64; here is $(uname -sm)"
    command -v flock >/dev/null || fail "the command flock is missing; install util-linux"
    python=
    for candidate in ${PYTHON:-python3 python3.12 python3.11}; do
        if fits "$candidate"; then
            python=$candidate
            break
        fi
    done
    [ -n "$python" ] || fail "Python 3.11 or 3.12 is needed; $(found_instead). Set PYTHON=/path/to/python3.12"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv module; install it (on Debian and Ubuntu: apt install python3-venv)"
}

found_instead() {
    if version=$("${PYTHON:-python3}" --version 2>&1); then
        echo "${PYTHON:-python3} is $version"
    else
        echo "${PYTHON:-python3} does not run"
    fi
}

# prepare DIRECTORY STAMP KEY INSTALL: leaves a virtual environment in which INSTALL ran to its end for KEY.
# Costs nothing where that is so already; runs side by side wait for one another; what was left half done
# (interrupted, or of another place) is made anew.
prepare() {
    is_fresh "$1" "$2" "$3" && return
    exec 9>"$1.lock"
    if ! flock -n 9; then
        say "another run is installing into $1; waiting for it"
        flock 9
    fi
    if ! is_fresh "$1" "$2" "$3"; then
        make_environment "$1"
        : >"$1/.unfinished"
        "$4" || fail "could not install into $1; what failed stands above"
        echo "$3" >"$1/.$2"
        rm "$1/.unfinished"
    fi
    exec 9>&-
}

is_fresh() {
    [ ! -e "$1/.unfinished" ] && [ -x "$1/bin/python" ] && [ "$(cat "$1/.$2" 2>/dev/null)" = "$3" ]
}

make_environment() {
    if [ ! -e "$1/.unfinished" ] && [ "$(cat "$1/.place" 2>/dev/null)" = "$PWD" ] &&
        "$1/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    find_python
    say "making $1 with $("$python" --version) ($(command -v "$python"))"
    rm -rf "$1"
    "$python" -m venv "$1" || fail "could not make $1"
    echo "$PWD" >"$1/.place"
}

key_of() {
    { pwd && cat "$@"; } | sha256sum | cut -d ' ' -f 1
}
