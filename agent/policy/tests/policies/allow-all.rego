package agent_policy

default CreateContainerRequest := true
default CreateSandboxRequest := true
default ExecProcessRequest := true
default ReadStreamRequest := true
default SetPolicyRequest := true
default SignalProcessRequest := true
default StartContainerRequest := true
default StatsContainerRequest := true
default WaitProcessRequest := true
default GuestDetailsRequest := true
default RemoveContainerRequest := true
default DestroySandboxRequest := true
