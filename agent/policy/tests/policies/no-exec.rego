# Everything but kubectl exec, kubectl logs and a change of the policy.
package agent_policy

default CreateContainerRequest := true
default CreateSandboxRequest := true
default ExecProcessRequest := false
default ReadStreamRequest := false
default SetPolicyRequest := false
default StartContainerRequest := true
default WaitProcessRequest := true
default GuestDetailsRequest := true
default RemoveContainerRequest := true
