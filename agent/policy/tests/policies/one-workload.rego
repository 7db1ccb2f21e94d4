# One workload, known by its image, command, environment and mounts.
package agent_policy

import future.keywords.every
import future.keywords.if
import future.keywords.in

default CreateContainerRequest := false

default ExecProcessRequest := false

workload := {
	"image": "registry.example/web@sha256:11",
	"args": ["/bin/web", "--port", "80"],
	"env": ["^PATH=/usr/bin:/bin$", "^POD_IP=[0-9.]+$"],
	"mounts": [
		{"destination": "/proc", "type_": "proc"},
		{"destination": "/etc/hosts", "type_": "bind", "source": "^/run/kata-containers/shared/containers/$(id)-[0-9a-f]+-hosts$"},
	],
}

CreateContainerRequest if {
	input.OCI.Annotations["io.kubernetes.cri.image-name"] == workload.image
	print("image is known;")
	input.OCI.Process.Args == workload.args
	print("arguments are right;")
	every variable in input.OCI.Process.Env {
		some pattern in workload.env
		regex.match(pattern, variable)
	}
	print("environment is right;")
	every mount in input.OCI.Mounts {
		some known in workload.mounts
		mount_is(known, mount)
	}
	print("mounts are right;")
	input.OCI.Process.User.UID != 0
	every storage in input.storages {
		storage.driver == "virtio-fs"
	}
}

mount_is(known, mount) if {
	known.destination == mount.destination
	known.type_ == mount.type_
	not known.source
}

mount_is(known, mount) if {
	known.destination == mount.destination
	known.type_ == mount.type_
	regex.match(replace(known.source, "$(id)", input.container_id), mount.source)
}

ExecProcessRequest if {
	concat(" ", input.process.Args) in {"/bin/health", "/bin/ready --now"}
}
