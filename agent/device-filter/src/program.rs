//! A filter as instructions of the kernel's BPF machine.
//!
//! The program gets the address of a `struct bpf_cgroup_dev_ctx` (kind and
//! access in one word, major, minor) and returns 1 for yes. It looks at the
//! last rule first and takes away what a rule allows from what is asked, until
//! nothing is left or a rule denies some of the rest.
//!
//! The verifier follows every way through a program and knows what a register
//! must hold on each. Would the numbers stay in registers, every comparison
//! would give it another state to follow to the end, and its work would grow
//! with the square of the rules. So a rule loads what it needs: when it is done
//! with that means nothing any more, and states meet again. For the same reason
//! the bits that are asked wait on the stack, in a byte of which the verifier
//! remembers only that it holds something.

use crate::filter::{Filter, MOST_RULES, is_whole};
use crate::rule::{Kind, Rule};

/// A `struct bpf_insn` in memory: code, registers, offset, immediate value.
pub type Instruction = [u8; 8];

/// The longest that one rule becomes.
const PER_RULE: usize = 10;

/// The rest, generously.
const FRAME: usize = 32;

// Jumps have 16 bits, and the longest goes over all rules.
const _: () = assert!(MOST_RULES * PER_RULE + FRAME < 1 << 15);

#[derive(Debug, Clone, Copy)]
enum Register {
    /// What the program returns.
    Answer = 0,
    /// The address of what is asked.
    Question = 1,
    Kind = 2,
    /// The bits that are asked and not allowed yet.
    Left = 3,
    Number = 4,
    Stack = 10,
}

/// Offsets in `struct bpf_cgroup_dev_ctx`.
const ACCESS_TYPE: i16 = 0;
const MAJOR: i16 = 4;
const MINOR: i16 = 8;

/// Where on the stack the bits are. Of words at multiples of eight the verifier would remember more.
const WAITING: i16 = -1;

/// `BPF_DEVCG_DEV_BLOCK` and `BPF_DEVCG_DEV_CHAR`.
const BLOCK: u32 = 1;
const CHAR: u32 = 2;

// Codes: the class (LDX 1, STX 3, ALU of 32 bits 4, JMP 5, JMP of 32 bits 6), the
// operation, and whether it takes a register (8) or the immediate value.
const LOAD_WORD: u8 = 0x61;
const LOAD_BYTE: u8 = 0x71;
const STORE_BYTE: u8 = 0x73;
const MOVE: u8 = 0xb4;
const MOVE_REGISTER: u8 = 0xbc;
const AND: u8 = 0x54;
const SHIFT_RIGHT: u8 = 0x74;
const JUMP: u8 = 0x05;
const JUMP_IF_OTHER: u8 = 0x56;
const JUMP_IF_ANY: u8 = 0x46;
const EXIT: u8 = 0x95;

fn instruction(code: u8, to: Register, from: Register, offset: i16, value: u32) -> Instruction {
    let [low, high] = offset.to_ne_bytes();
    let [a, b, c, d] = value.to_ne_bytes();
    // The order of the two registers in their byte is that of the machine, too.
    let (to, from) = (to as u8, from as u8);
    let registers = if cfg!(target_endian = "little") { from << 4 | to } else { to << 4 | from };
    [code, registers, low, high, a, b, c, d]
}

fn load(to: Register, offset: i16) -> Instruction {
    instruction(LOAD_WORD, to, Register::Question, offset, 0)
}

fn with_value(code: u8, to: Register, value: u32) -> Instruction {
    instruction(code, to, Register::Answer, 0, value)
}

/// Goes over so many instructions, without a condition or if the register compares to the value as `code` says.
fn over(length: usize, code: u8, register: Register, value: u32) -> Instruction {
    #[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "a program is shorter; see FRAME")]
    let length = length as i16;
    instruction(code, register, Register::Answer, length, value)
}

fn answer(allow: bool) -> [Instruction; 2] {
    [with_value(MOVE, Register::Answer, allow.into()), with_value(EXIT, Register::Answer, 0)]
}

/// The instructions of one rule; behind them is the rule before it.
fn rule(program: &mut Vec<Instruction>, rule: &Rule) {
    let whole = is_whole(rule);
    let decision = match (whole, rule.allow) {
        (true, _) => 2,
        (false, true) => 6,
        (false, false) => 5,
    };
    let minor = if rule.minor.is_some() { 2 } else { 0 };
    for (number, offset, rest) in [(rule.major, MAJOR, minor + decision), (rule.minor, MINOR, decision)] {
        if let Some(number) = number {
            program.push(load(Register::Number, offset));
            program.push(over(rest, JUMP_IF_OTHER, Register::Number, number));
        }
    }
    let bits = u32::from(rule.access.bits());
    if !whole {
        program.push(instruction(LOAD_BYTE, Register::Left, Register::Stack, WAITING, 0));
    }
    if !whole && rule.allow {
        program.push(with_value(AND, Register::Left, !bits));
        program.push(instruction(STORE_BYTE, Register::Stack, Register::Left, WAITING, 0));
        program.push(over(2, JUMP_IF_OTHER, Register::Left, 0));
    } else if !whole {
        program.push(over(1, JUMP_IF_ANY, Register::Left, bits));
        program.push(over(2, JUMP, Register::Answer, 0));
    }
    program.extend(answer(rule.allow));
}

pub(crate) fn of(filter: &Filter) -> Vec<Instruction> {
    let mut program = vec![
        load(Register::Kind, ACCESS_TYPE),
        instruction(MOVE_REGISTER, Register::Left, Register::Kind, 0, 0),
        with_value(SHIFT_RIGHT, Register::Left, 16),
        with_value(AND, Register::Kind, 0xffff),
        over(2, JUMP_IF_OTHER, Register::Left, 0),
    ];
    program.extend(answer(true));
    program.push(instruction(STORE_BYTE, Register::Stack, Register::Left, WAITING, 0));
    for (kind, number) in [(Kind::Char, CHAR), (Kind::Block, BLOCK)] {
        let mut part = Vec::new();
        for one in filter.rules.iter().rev().filter(|rule| rule.kind == kind) {
            rule(&mut part, one);
        }
        part.extend(answer(filter.otherwise));
        program.push(over(part.len(), JUMP_IF_OTHER, Register::Kind, number));
        program.append(&mut part);
    }
    program.extend(answer(filter.otherwise));
    program
}
