//! Compiles a filter to BPF instructions.
//!
//! The program gets a pointer to a `struct bpf_cgroup_dev_ctx` (type and access in one word, major, minor) and
//! returns 1 to allow. It checks the last rule first and removes the bits that a rule allows from the requested
//! ones, until none remain or a rule denies one of the rest.
//!
//! The verifier follows every path and tracks the value of each register. If the numbers stayed in registers,
//! every comparison would create another state to follow to the end, and verification would be quadratic in the
//! number of rules. So each rule loads what it needs: afterwards the registers are dead, and states merge. For
//! the same reason the remaining bits are kept on the stack, in a byte of which the verifier tracks only that it
//! is initialised.

use crate::filter::{Filter, MAX_RULES, is_unrestricted};
use crate::rule::{Kind, Rule};

/// A `struct bpf_insn` in memory: code, registers, offset, immediate value.
pub type Instruction = [u8; 8];

/// The most instructions of one rule.
const PER_RULE: usize = 10;

/// An upper bound for the rest of the program.
const OVERHEAD: usize = 32;

// Jump offsets have 16 bits, and the longest jump skips all rules.
const _: () = assert!(MAX_RULES * PER_RULE + OVERHEAD < 1 << 15);

#[derive(Debug, Clone, Copy)]
enum Register {
    /// The return value.
    Return = 0,
    /// The pointer to the context.
    Context = 1,
    Kind = 2,
    /// The requested bits that are not allowed yet.
    Remaining = 3,
    Number = 4,
    Stack = 10,
}

/// Offsets in `struct bpf_cgroup_dev_ctx`.
const ACCESS_TYPE: i16 = 0;
const MAJOR: i16 = 4;
const MINOR: i16 = 8;

/// The stack offset of the remaining bits. The verifier would track the value of aligned eight-byte slots.
const REMAINING_SLOT: i16 = -1;

/// `BPF_DEVCG_DEV_BLOCK` and `BPF_DEVCG_DEV_CHAR`.
const BLOCK: u32 = 1;
const CHAR: u32 = 2;

// Opcodes: the class (LDX 1, STX 3, ALU32 4, JMP 5, JMP32 6), the operation, and the source: register (8) or
// immediate.
const LOAD_WORD: u8 = 0x61;
const LOAD_BYTE: u8 = 0x71;
const STORE_BYTE: u8 = 0x73;
const MOVE: u8 = 0xb4;
const MOVE_REGISTER: u8 = 0xbc;
const AND: u8 = 0x54;
const SHIFT_RIGHT: u8 = 0x74;
const JUMP: u8 = 0x05;
const JUMP_IF_NOT_EQUAL: u8 = 0x56;
const JUMP_IF_BITS_SET: u8 = 0x46;
const EXIT: u8 = 0x95;

fn instruction(code: u8, to: Register, from: Register, offset: i16, value: u32) -> Instruction {
    let [low, high] = offset.to_ne_bytes();
    let [a, b, c, d] = value.to_ne_bytes();
    // The order of the two registers in their byte depends on the endianness.
    let (to, from) = (to as u8, from as u8);
    let registers = if cfg!(target_endian = "little") { from << 4 | to } else { to << 4 | from };
    [code, registers, low, high, a, b, c, d]
}

fn load(to: Register, offset: i16) -> Instruction {
    instruction(LOAD_WORD, to, Register::Context, offset, 0)
}

fn immediate(code: u8, to: Register, value: u32) -> Instruction {
    instruction(code, to, Register::Return, 0, value)
}

/// Skips `length` instructions, unconditionally or if `register` and `value` satisfy the condition of `code`.
fn skip(length: usize, code: u8, register: Register, value: u32) -> Instruction {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        reason = "a program is shorter; see OVERHEAD"
    )]
    let length = length as i16;
    instruction(code, register, Register::Return, length, value)
}

fn return_verdict(allow: bool) -> [Instruction; 2] {
    [immediate(MOVE, Register::Return, allow.into()), immediate(EXIT, Register::Return, 0)]
}

/// Appends the instructions of one rule; those of the preceding rule follow.
fn rule(program: &mut Vec<Instruction>, rule: &Rule) {
    let unrestricted = is_unrestricted(rule);
    let decision = match (unrestricted, rule.allow) {
        (true, _) => 2,
        (false, true) => 6,
        (false, false) => 5,
    };
    let minor = if rule.minor.is_some() { 2 } else { 0 };
    for (number, offset, rest) in [(rule.major, MAJOR, minor + decision), (rule.minor, MINOR, decision)] {
        if let Some(number) = number {
            program.push(load(Register::Number, offset));
            program.push(skip(rest, JUMP_IF_NOT_EQUAL, Register::Number, number));
        }
    }
    let bits = u32::from(rule.access.bits());
    if !unrestricted {
        program.push(instruction(LOAD_BYTE, Register::Remaining, Register::Stack, REMAINING_SLOT, 0));
    }
    if !unrestricted && rule.allow {
        program.push(immediate(AND, Register::Remaining, !bits));
        program.push(instruction(STORE_BYTE, Register::Stack, Register::Remaining, REMAINING_SLOT, 0));
        program.push(skip(2, JUMP_IF_NOT_EQUAL, Register::Remaining, 0));
    } else if !unrestricted {
        program.push(skip(1, JUMP_IF_BITS_SET, Register::Remaining, bits));
        program.push(skip(2, JUMP, Register::Return, 0));
    }
    program.extend(return_verdict(rule.allow));
}

pub(crate) fn compile(filter: &Filter) -> Vec<Instruction> {
    let mut program = vec![
        load(Register::Kind, ACCESS_TYPE),
        instruction(MOVE_REGISTER, Register::Remaining, Register::Kind, 0, 0),
        immediate(SHIFT_RIGHT, Register::Remaining, 16),
        immediate(AND, Register::Kind, 0xffff),
        skip(2, JUMP_IF_NOT_EQUAL, Register::Remaining, 0),
    ];
    program.extend(return_verdict(true));
    program.push(instruction(STORE_BYTE, Register::Stack, Register::Remaining, REMAINING_SLOT, 0));
    for (kind, number) in [(Kind::Char, CHAR), (Kind::Block, BLOCK)] {
        let mut part = Vec::new();
        for one in filter.rules.iter().rev().filter(|rule| rule.kind == kind) {
            rule(&mut part, one);
        }
        part.extend(return_verdict(filter.default_allow));
        program.push(skip(part.len(), JUMP_IF_NOT_EQUAL, Register::Kind, number));
        program.append(&mut part);
    }
    program.extend(return_verdict(filter.default_allow));
    program
}
