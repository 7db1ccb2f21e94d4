//! Compares three implementations: the normalised rules, the program in a BPF interpreter, and a naive evaluation
//! of the list.

use proptest::prelude::*;

use super::*;

/// Evaluates the rules in order, bit by bit, without normalisation.
fn naive(rules: &[Rule], request: &AccessRequest) -> bool {
    [Access::READ, Access::WRITE, Access::MKNOD].into_iter().filter(|bit| request.access.intersects(*bit)).all(|bit| {
        let mut allowed = false;
        for rule in rules {
            let same = rule.kind == request.kind
                && [None, Some(request.major)].contains(&rule.major)
                && [None, Some(request.minor)].contains(&rule.minor);
            if rule.kind == Kind::All || same && rule.access.intersects(bit) {
                allowed = rule.allow;
            }
        }
        allowed
    })
}

/// Runs a program as the kernel would, and refuses what its verifier refuses.
fn run(program: &[Instruction], request: &AccessRequest) -> bool {
    let kind = if request.kind == Kind::Block { 1 } else { 2 };
    let question = [u32::from(request.access.bits()) << 16 | kind, request.major, request.minor];
    let mut registers = [None::<u32>; 11];
    let mut stack = None;
    let mut at = 0;
    loop {
        let [code, places, low, high, value @ ..] = program[at];
        let (to, from) = (usize::from(places & 15), usize::from(places >> 4));
        let offset = i16::from_ne_bytes([low, high]);
        let value = u32::from_ne_bytes(value);
        let jump = || usize::try_from(offset).expect("a backward jump");
        let held = |register: usize| registers[register].expect("an uninitialised register");
        at += 1;
        match code {
            0x61 => {
                assert!(from == 1 && to != 1 && offset % 4 == 0, "a load from elsewhere");
                registers[to] = Some(question[jump() / 4]);
            }
            0x71 => {
                assert_eq!((from, offset), (10, -1), "a load from elsewhere");
                registers[to] = Some(u32::from(stack.expect("an uninitialised byte")));
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
                assert!(answer < 2, "neither 0 nor 1");
                return answer == 1;
            }
            other => panic!("unexpected opcode {other:#x}"),
        }
    }
}

fn rule(allow: bool, kind: Kind, major: Option<u32>, minor: Option<u32>, access: &str) -> Rule {
    Rule { allow, kind, major, minor, access: Access::parse(access).unwrap() }
}

fn all_agree(rules: &[Rule], request: &AccessRequest) -> bool {
    let filter = Filter::new(rules).unwrap();
    let answer = naive(rules, request);
    assert_eq!(filter.allows(request), answer, "the rules: {rules:?} {request:?}");
    assert_eq!(run(&filter.program(), request), answer, "the program: {rules:?} {request:?}");
    answer
}

/// Returns the access sets that the rules allow for the character device 195:0.
fn allowed(rules: &[Rule]) -> Vec<&'static str> {
    let sets = ["", "r", "w", "m", "rw", "rm", "wm", "rwm"];
    let request = |set| AccessRequest { kind: Kind::Char, major: 195, minor: 0, access: Access::parse(set).unwrap() };
    sets.into_iter().filter(|set| all_agree(rules, &request(set))).collect()
}

#[test]
fn every_access_bit_is_decided_separately() {
    let gpu = |allow, access| rule(allow, Kind::Char, Some(195), Some(0), access);
    assert_eq!(allowed(&[]), [""]);
    assert_eq!(allowed(&[gpu(true, "r")]), ["", "r"]);
    assert_eq!(allowed(&[gpu(true, "r"), gpu(true, "w")]), ["", "r", "w", "rw"]);
    assert_eq!(allowed(&[gpu(true, "rwm"), gpu(false, "w")]), ["", "r", "m", "rm"]);
    assert_eq!(allowed(&[gpu(false, "w"), gpu(true, "rw")]), ["", "r", "w", "rw"]);
    assert_eq!(allowed(&[gpu(true, "rw"), gpu(true, "")]), ["", "r", "w", "rw"]);
}

#[test]
fn all_rule_discards_the_rules_before_it() {
    let all = |allow| rule(allow, Kind::All, None, None, "");
    let gpu = |allow, access| rule(allow, Kind::Char, Some(195), None, access);
    assert_eq!(allowed(&[gpu(true, "rwm"), all(false)]), [""]);
    assert_eq!(allowed(&[gpu(false, "rwm"), all(true)]).len(), 8);
    assert_eq!(allowed(&[all(true), gpu(false, "rm")]), ["", "w"]);
    assert_eq!(allowed(&[all(true), rule(false, Kind::Block, None, None, "rwm")]).len(), 8);
    assert_eq!(Filter::new(&[gpu(true, "rwm"), all(false), gpu(true, "")]).unwrap(), Filter::default());
}

#[test]
fn device_numbers_are_compared_in_all_32_bits() {
    let large = rule(true, Kind::Char, Some(u32::MAX), Some(1 << 31), "rwm");
    let request = |major, minor| AccessRequest { kind: Kind::Char, major, minor, access: Access::READ };
    assert!(all_agree(&[large], &request(u32::MAX, 1 << 31)));
    assert!(!all_agree(&[large], &request(u32::MAX, 0)) && !all_agree(&[large], &request(0, 1 << 31)));
}

#[test]
fn longest_list_compiles_and_a_longer_one_is_an_error() {
    let some = |number| rule(number % 3 > 0, Kind::Block, Some(number), Some(number), "rw");
    let mut rules: Vec<Rule> = (0..1024).map(some).collect();
    for (major, answer) in [(0, false), (1, true), (512, true), (1023, false), (1024, false)] {
        let request = AccessRequest { kind: Kind::Block, major, minor: major, access: Access::READ };
        assert_eq!(all_agree(&rules, &request), answer, "{major}");
    }
    assert!(Filter::new(&rules).unwrap().program().len() < 1 << 14);
    rules.push(some(1024));
    let error = Filter::new(&rules).unwrap_err();
    assert_eq!(error, Error::TooMany { count: 1025 });
    assert!(error.to_string().contains("1025") && error.to_string().contains("1024"), "{error}");
}

#[test]
fn rule_serializes_to_a_short_list_and_invalid_lists_are_refused() {
    let text = serde_json::to_string(&rule(true, Kind::Char, Some(195), None, "rwm")).unwrap();
    assert_eq!(text, r#"[true,"c",195,null,7]"#);
    for wrong in [r#"[true,"c",195,null,8]"#, r#"[true,"p",195,null,7]"#, r#"[true,"c",-1,null,7]"#, "[]"] {
        assert!(serde_json::from_str::<Rule>(wrong).is_err(), "{wrong}");
    }
    assert_eq!(Access::parse("rx"), None);
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
    fn program_rules_and_naive_evaluation_agree(rules in rules(), block: bool, major in numbers(), minor in numbers()) {
        let kind = if block { Kind::Block } else { Kind::Char };
        for bits in 0..8 {
            let access = Access::try_from(bits).unwrap();
            all_agree(&rules, &AccessRequest { kind, major, minor, access });
        }
    }

    #[test]
    fn rules_round_trip(rules in rules()) {
        let text = serde_json::to_string(&rules).unwrap();
        prop_assert_eq!(serde_json::from_str::<Vec<Rule>>(&text).unwrap(), rules);
    }

    #[test]
    fn normalising_is_idempotent(rules in rules()) {
        let filter = Filter::new(&rules).unwrap();
        let mut again = filter.rules.clone();
        again.insert(0, rule(filter.default_allow, Kind::All, None, None, "rwm"));
        prop_assert_eq!(Filter::new(&again).unwrap(), filter);
    }
}
