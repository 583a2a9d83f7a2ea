# Completion of Lockstep in fish: lockstep completion fish | source
function __lockstep
    lockstep completion -- (commandline -opc) (commandline -ct | string collect --allow-empty) 2>/dev/null
end

complete -c lockstep -a '(__lockstep)'
for program in python python3 torchrun
    complete -c $program -n 'commandline -opc | string match -q -- "-m"' -a '(__lockstep)'
end
