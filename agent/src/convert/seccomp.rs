//! Converts seccomp filters.

use firstlight_agent_api::oci;
use oci_spec::runtime::{
    LinuxSeccomp, LinuxSeccompAction, LinuxSeccompArg, LinuxSeccompArgBuilder, LinuxSeccompBuilder,
    LinuxSeccompOperator, LinuxSyscall, LinuxSyscallBuilder,
};

use super::{ConvertError, Result, parse_name, parse_names, some};

/// System calls have six arguments.
const ARGUMENTS: u64 = 6;

pub(super) fn seccomp(message: &oci::LinuxSeccomp) -> Result<LinuxSeccomp> {
    let mut seccomp = LinuxSeccompBuilder::default().build()?;
    seccomp
        .set_default_action(parse_name("seccomp action", &message.DefaultAction)?)
        .set_architectures(some(&parse_names::<_, Vec<_>>("architecture", &message.Architectures)?))
        .set_flags(some(&parse_names::<_, Vec<_>>("seccomp flag", &message.Flags)?))
        .set_syscalls(Some(message.Syscalls.iter().map(syscall).collect::<Result<_>>()?));
    Ok(seccomp)
}

fn syscall(message: &oci::LinuxSyscall) -> Result<LinuxSyscall> {
    let action: LinuxSeccompAction = parse_name("seccomp action", &message.Action)?;
    let builder = LinuxSyscallBuilder::default().names(message.Names.clone()).action(action);
    let builder = match &message.ErrnoRet {
        Some(oci::linux_syscall::ErrnoRet::Errnoret(errno)) => builder.errno_ret(*errno),
        _ => builder,
    };
    let args: Vec<LinuxSeccompArg> = message.Args.iter().map(argument).collect::<Result<_>>()?;
    Ok(if args.is_empty() { builder } else { builder.args(args) }.build()?)
}

fn argument(message: &oci::LinuxSeccompArg) -> Result<LinuxSeccompArg> {
    let index = usize::try_from(message.Index).ok().filter(|_| message.Index < ARGUMENTS);
    let value = i64::try_from(message.Index).unwrap_or(i64::MAX);
    Ok(LinuxSeccompArgBuilder::default()
        .index(index.ok_or(ConvertError::Range { what: "seccomp argument", value })?)
        .value(message.Value)
        .value_two(message.ValueTwo)
        .op(parse_name::<LinuxSeccompOperator>("seccomp comparison", &message.Op)?)
        .build()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter() -> oci::LinuxSeccomp {
        let mut call = oci::LinuxSyscall::new();
        call.Names = vec!["mkdir".into()];
        call.Action = "SCMP_ACT_ERRNO".into();
        call.ErrnoRet = Some(oci::linux_syscall::ErrnoRet::Errnoret(38));
        call.Args = vec![oci::LinuxSeccompArg { Index: 1, Op: "SCMP_CMP_EQ".into(), ..Default::default() }];
        oci::LinuxSeccomp {
            DefaultAction: "SCMP_ACT_ALLOW".into(),
            Architectures: vec!["SCMP_ARCH_X86_64".into()],
            Flags: vec!["SECCOMP_FILTER_FLAG_LOG".into()],
            Syscalls: vec![call],
            ..Default::default()
        }
    }

    #[test]
    fn filters_are_converted() {
        let seccomp = seccomp(&filter()).unwrap();
        assert_eq!(seccomp.default_action(), LinuxSeccompAction::ScmpActAllow);
        let call = &seccomp.syscalls().as_ref().unwrap()[0];
        assert_eq!((call.errno_ret(), call.args().as_ref().map(Vec::len)), (Some(38), Some(1)));
    }

    #[test]
    fn unknown_names_are_reported() {
        for (spoil, part) in [
            ((|m| m.DefaultAction = "SCMP_ACT_SING".into()) as fn(&mut oci::LinuxSeccomp), "SCMP_ACT_SING"),
            (|m| m.Architectures = vec!["SCMP_ARCH_Z80".into()], "SCMP_ARCH_Z80"),
            (|m| m.Flags = vec!["X".into()], "\"X\""),
            (|m| m.Syscalls[0].Args[0].Op = "SCMP_CMP_X".into(), "SCMP_CMP_X"),
            (|m| m.Syscalls[0].Args[0].Index = 6, "argument 6"),
        ] {
            let mut message = filter();
            spoil(&mut message);
            let error = seccomp(&message).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
