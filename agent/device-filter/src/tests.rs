//! Three ways to the same answer: the rules from the end, the program in a
//! machine of its own, and the list of rules as it is written.

use proptest::prelude::*;

use super::*;

/// What the rules say, in their order, bit by bit, with nothing brought into a form.
fn naive(rules: &[Rule], asked: &Asked) -> bool {
    [Access::READ, Access::WRITE, Access::MKNOD].into_iter().filter(|bit| asked.access.meets(*bit)).all(|bit| {
        let mut allowed = false;
        for rule in rules {
            let same = rule.kind == asked.kind
                && [None, Some(asked.major)].contains(&rule.major)
                && [None, Some(asked.minor)].contains(&rule.minor);
            if rule.kind == Kind::All || same && rule.access.meets(bit) {
                allowed = rule.allow;
            }
        }
        allowed
    })
}

/// Runs a program as the kernel would, and refuses what its verifier refuses.
fn run(program: &[Instruction], asked: &Asked) -> bool {
    let kind = if asked.kind == Kind::Block { 1 } else { 2 };
    let question = [u32::from(asked.access.bits()) << 16 | kind, asked.major, asked.minor];
    let mut registers = [None::<u32>; 11];
    let mut stack = None;
    let mut at = 0;
    loop {
        let [code, places, low, high, value @ ..] = program[at];
        let (to, from) = (usize::from(places & 15), usize::from(places >> 4));
        let offset = i16::from_ne_bytes([low, high]);
        let value = u32::from_ne_bytes(value);
        let jump = || usize::try_from(offset).expect("a way back");
        let held = |register: usize| registers[register].expect("a register that holds nothing");
        at += 1;
        match code {
            0x61 => {
                assert!(from == 1 && to != 1 && offset % 4 == 0, "a load from elsewhere");
                registers[to] = Some(question[jump() / 4]);
            }
            0x71 => {
                assert_eq!((from, offset), (10, -1), "a load from elsewhere");
                registers[to] = Some(u32::from(stack.expect("a byte that holds nothing")));
            }
            0x73 => {
                assert_eq!((to, offset), (10, -1), "a store to elsewhere");
                stack = Some(held(from).to_le_bytes()[0]);
            }
            0xb4 => registers[to] = Some(value),
            0xbc => registers[to] = Some(held(from)),
            0x54 => registers[to] = Some(held(to) & value),
            0x74 => registers[to] = Some(held(to) >> value),
            0x05 => at += jump(),
            0x56 if held(to) != value => at += jump(),
            0x46 if held(to) & value != 0 => at += jump(),
            0x56 | 0x46 => {}
            0x95 => {
                let answer = held(0);
                assert!(answer < 2, "neither yes nor no");
                return answer == 1;
            }
            other => panic!("{other:#x} is no code that we write"),
        }
    }
}

fn rule(allow: bool, kind: Kind, major: Option<u32>, minor: Option<u32>, access: &str) -> Rule {
    Rule { allow, kind, major, minor, access: Access::of(access).unwrap() }
}

fn all_agree(rules: &[Rule], asked: &Asked) -> bool {
    let filter = Filter::new(rules).unwrap();
    let answer = naive(rules, asked);
    assert_eq!(filter.allows(asked), answer, "the rules: {rules:?} {asked:?}");
    assert_eq!(run(&filter.program(), asked), answer, "the program: {rules:?} {asked:?}");
    answer
}

/// Which of these words the rules allow for the character device 195:0.
fn allowed(rules: &[Rule]) -> Vec<&'static str> {
    let words = ["", "r", "w", "m", "rw", "rm", "wm", "rwm"];
    let asked = |word| Asked { kind: Kind::Char, major: 195, minor: 0, access: Access::of(word).unwrap() };
    words.into_iter().filter(|word| all_agree(rules, &asked(word))).collect()
}

#[test]
fn every_bit_is_decided_by_itself() {
    let gpu = |allow, access| rule(allow, Kind::Char, Some(195), Some(0), access);
    assert_eq!(allowed(&[]), [""]);
    assert_eq!(allowed(&[gpu(true, "r")]), ["", "r"]);
    assert_eq!(allowed(&[gpu(true, "r"), gpu(true, "w")]), ["", "r", "w", "rw"]);
    assert_eq!(allowed(&[gpu(true, "rwm"), gpu(false, "w")]), ["", "r", "m", "rm"]);
    assert_eq!(allowed(&[gpu(false, "w"), gpu(true, "rw")]), ["", "r", "w", "rw"]);
    assert_eq!(allowed(&[gpu(true, "rw"), gpu(true, "")]), ["", "r", "w", "rw"]);
}

#[test]
fn a_rule_about_everything_throws_the_others_away() {
    let all = |allow| rule(allow, Kind::All, None, None, "");
    let gpu = |allow, access| rule(allow, Kind::Char, Some(195), None, access);
    assert_eq!(allowed(&[gpu(true, "rwm"), all(false)]), [""]);
    assert_eq!(allowed(&[gpu(false, "rwm"), all(true)]).len(), 8);
    assert_eq!(allowed(&[all(true), gpu(false, "rm")]), ["", "w"]);
    assert_eq!(allowed(&[all(true), rule(false, Kind::Block, None, None, "rwm")]).len(), 8);
    assert_eq!(Filter::new(&[gpu(true, "rwm"), all(false), gpu(true, "")]).unwrap(), Filter::default());
}

#[test]
fn numbers_are_compared_whole() {
    let large = rule(true, Kind::Char, Some(u32::MAX), Some(1 << 31), "rwm");
    let asked = |major, minor| Asked { kind: Kind::Char, major, minor, access: Access::READ };
    assert!(all_agree(&[large], &asked(u32::MAX, 1 << 31)));
    assert!(!all_agree(&[large], &asked(u32::MAX, 0)) && !all_agree(&[large], &asked(0, 1 << 31)));
}

#[test]
fn the_longest_list_is_a_program_and_a_longer_one_an_error() {
    let some = |number| rule(number % 3 > 0, Kind::Block, Some(number), Some(number), "rw");
    let mut rules: Vec<Rule> = (0..1024).map(some).collect();
    for (major, answer) in [(0, false), (1, true), (512, true), (1023, false), (1024, false)] {
        let asked = Asked { kind: Kind::Block, major, minor: major, access: Access::READ };
        assert_eq!(all_agree(&rules, &asked), answer, "{major}");
    }
    assert!(Filter::new(&rules).unwrap().program().len() < 1 << 14);
    rules.push(some(1024));
    let error = Filter::new(&rules).unwrap_err();
    assert_eq!(error, Error::TooMany { count: 1025 });
    assert!(error.to_string().contains("1025") && error.to_string().contains("1024"), "{error}");
}

#[test]
fn a_rule_is_short_in_messages_and_nothing_else_is_one() {
    let text = serde_json::to_string(&rule(true, Kind::Char, Some(195), None, "rwm")).unwrap();
    assert_eq!(text, r#"[true,"c",195,null,7]"#);
    for wrong in [r#"[true,"c",195,null,8]"#, r#"[true,"p",195,null,7]"#, r#"[true,"c",-1,null,7]"#, "[]"] {
        assert!(serde_json::from_str::<Rule>(wrong).is_err(), "{wrong}");
    }
    assert_eq!(Access::of("rx"), None);
}

fn numbers() -> impl Strategy<Value = u32> {
    prop_oneof![4 => 0u32..3, 1 => Just(1 << 31), 1 => Just(u32::MAX)]
}

fn access() -> impl Strategy<Value = Access> {
    (0u8..8).prop_map(|bits| Access::try_from(bits).unwrap())
}

fn rules() -> impl Strategy<Value = Vec<Rule>> {
    let kinds = prop_oneof![1 => Just(Kind::All), 8 => Just(Kind::Char), 4 => Just(Kind::Block)];
    let number = || proptest::option::of(numbers());
    let one = (any::<bool>(), kinds, number(), number(), access());
    proptest::collection::vec(one.prop_map(Rule::from), 0..24)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn program_and_rules_and_the_naive_list_agree(rules in rules(), block: bool, major in numbers(), minor in numbers()) {
        let kind = if block { Kind::Block } else { Kind::Char };
        for bits in 0..8 {
            let access = Access::try_from(bits).unwrap();
            all_agree(&rules, &Asked { kind, major, minor, access });
        }
    }

    #[test]
    fn rules_round_trip(rules in rules()) {
        let text = serde_json::to_string(&rules).unwrap();
        prop_assert_eq!(serde_json::from_str::<Vec<Rule>>(&text).unwrap(), rules);
    }

    #[test]
    fn what_is_left_of_a_list_says_the_same_again(rules in rules()) {
        let filter = Filter::new(&rules).unwrap();
        let mut again = filter.rules.clone();
        again.insert(0, rule(filter.otherwise, Kind::All, None, None, "rwm"));
        prop_assert_eq!(Filter::new(&again).unwrap(), filter);
    }
}
