# Completion of Lockstep in zsh: eval "$(lockstep completion zsh)"
_lockstep() {
    local program=lockstep
    local -a found
    [[ $words[1] == *lockstep ]] && program=$words[1]
    found=("${(@f)$("$program" completion -- "${(@)words[1,CURRENT-1]}" "$PREFIX" 2>/dev/null)}")
    found=(${found:#})
    if (( $#found )); then
        compadd -S '' -- ${(M)found:#*[=.]}
        compadd -- ${found:#*[=.]}
    else
        compset -P '*='
        _files
    fi
}

_lockstep_module() {
    if [[ " $words[1,CURRENT]" == *(" -m trainer"|lockstep)* ]]; then
        _lockstep
    elif [[ $words[1] == *python* ]] && (( $+functions[_python] )); then
        _python
    else
        _files
    fi
}

(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
compdef _lockstep lockstep
compdef _lockstep_module python python3 torchrun
