# Completion of Lockstep in bash: eval "$(lockstep completion bash)"
_lockstep() {
    local line=${COMP_LINE:0:COMP_POINT} program=lockstep words word
    [[ $1 == *lockstep ]] && program=$1
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    mapfile -t COMPREPLY < <("$program" completion -- "${words[@]}" 2>/dev/null)
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace 2>/dev/null
    word=${words[-1]}
    if [[ $word == *=* && $COMP_WORDBREAKS == *=* ]]; then  # readline completes what follows it
        COMPREPLY=("${COMPREPLY[@]#"${word%%=*}="}")
    fi
}

_lockstep_module() {
    local given=" ${COMP_LINE:0:COMP_POINT}"
    if [[ $given == *" -m trainer"* || $given == *lockstep* ]]; then
        _lockstep "$@"
    elif [[ $1 == *python* ]] && declare -F _python >/dev/null; then
        _python "$@"
    fi
}

declare -F __load_completion >/dev/null && __load_completion python
complete -o default -F _lockstep lockstep
complete -o default -o bashdefault -F _lockstep_module python python3 torchrun
