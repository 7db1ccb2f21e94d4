# At most two containers, and only they may be started: the policy keeps state.
package agent_policy

import future.keywords.if

default CreateContainerRequest := {"allowed": false}

CreateContainerRequest := {"allowed": true, "ops": ops} if {
	count(object.get(data.pstate, "containers", {})) < 2
	ops := array.concat(directory, [{"op": "add", "path": concat("", ["/pstate/containers/", input.container_id]), "value": true}])
}

directory := [] if data.pstate.containers

directory := [{"op": "add", "path": "/pstate/containers", "value": {}}] if not data.pstate.containers

StartContainerRequest if data.pstate.containers[input.container_id]

RemoveContainerRequest := {"allowed": true, "ops": [{"op": "remove", "path": concat("", ["/pstate/containers/", input.container_id])}]}
