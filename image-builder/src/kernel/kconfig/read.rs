//! Parser of the Kconfig files of a kernel's source.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use super::expr::Expr;

/// Maximum size of a Kconfig file.
const MAX_FILE_SIZE: u64 = 4 << 20;
/// Maximum number of files: the kernel has 1,700.
const MAX_FILES: usize = 20_000;
/// Maximum nesting of `source` statements and of menus.
const MAX_DEPTH: usize = 64;

/// One definition of a symbol; a symbol may have several.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Definition {
    /// Its dependencies, including those of enclosing blocks.
    pub depends: Option<Expr>,
    /// Its prompt, if it has one.
    pub prompt: Option<Prompt>,
    /// Whether it is a member of a `choice`.
    pub of_choice: bool,
}

/// A symbol's prompt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prompt {
    /// The condition of the prompt; `None` means always.
    pub when: Option<Expr>,
}

/// The symbols of a source tree.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Symbols {
    /// Definitions by symbol.
    pub definitions: BTreeMap<String, Vec<Definition>>,
    /// By selected symbol: the selecting symbols and conditions.
    pub selected: BTreeMap<String, Vec<(String, Option<Expr>)>>,
}

/// Why a source tree cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read.
    #[error("failed to read {}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// Not a kernel source tree.
    #[error("{} is not a kernel source tree: {what}", dir.display())]
    NotKernelSource {
        /// The directory.
        dir: PathBuf,
        /// What is wrong.
        what: String,
    },
}

/// An enclosing block.
enum Frame {
    If(Option<Expr>),
    Menu { depends: Option<Expr>, visible: Option<Expr> },
    Choice { depends: Option<Expr>, prompt: Option<Prompt> },
}

/// The entry that attribute lines belong to.
enum Current {
    Nothing,
    Symbol {
        name: String,
        own: Definition,
    },
    /// The innermost frame.
    Frame,
}

/// Parser state; evaluates `$(SRCARCH)` as x86.
struct Reader<'a> {
    root: &'a Path,
    seen: HashSet<PathBuf>,
    symbols: Symbols,
    frames: Vec<Frame>,
    current: Current,
}

impl Symbols {
    /// Reads the source tree at `root`.
    ///
    /// # Errors
    /// It has no `Kconfig` file, or its files are invalid.
    pub fn read(root: &Path) -> Result<Self, Error> {
        let mut reader = Reader::new(root);
        let top = Path::new("Kconfig");
        fs::metadata(root.join(top)).map_err(|source| Error::Read { file: root.join(top), source })?;
        reader.file(top, 0)?;
        reader.end_symbol();
        if reader.symbols.definitions.is_empty() {
            let what = "its Kconfig files define no symbol".to_owned();
            return Err(Error::NotKernelSource { dir: root.to_owned(), what });
        }
        Ok(reader.symbols)
    }

    /// Parses the text of one file; ignores its `source` statements.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let mut reader = Reader::new(Path::new(""));
        let _ = reader.text(text, MAX_DEPTH);
        reader.end_symbol();
        reader.symbols
    }
}

impl<'a> Reader<'a> {
    fn new(root: &'a Path) -> Self {
        let (symbols, frames) = (Symbols::default(), Vec::new());
        Self { root, seen: HashSet::new(), symbols, frames, current: Current::Nothing }
    }

    fn file(&mut self, path: &Path, depth: usize) -> Result<(), Error> {
        let wrong = |what: &str| Error::NotKernelSource { dir: self.root.to_owned(), what: what.to_owned() };
        let plain = path.components().all(|part| matches!(part, Component::Normal(_)));
        if !plain {
            return Err(wrong(&format!("{} points outside it", path.display())));
        }
        if !self.seen.insert(path.to_owned()) {
            return Ok(());
        }
        if self.seen.len() > MAX_FILES || depth >= MAX_DEPTH {
            return Err(wrong("its Kconfig files are too many or nested too deeply"));
        }
        let file = self.root.join(path);
        // Distributions omit parts that they do not build.
        let Ok(metadata) = fs::metadata(&file) else { return Ok(()) };
        if !metadata.is_file() || metadata.len() > MAX_FILE_SIZE {
            return Err(wrong(&format!("{} is not a Kconfig file", path.display())));
        }
        let bytes = fs::read(&file).map_err(|source| Error::Read { file: file.clone(), source })?;
        self.text(&String::from_utf8_lossy(&bytes), depth)
    }

    fn text(&mut self, text: &str, depth: usize) -> Result<(), Error> {
        // Indentation of a help text; a line with less ends it.
        let mut help: Option<Option<usize>> = None;
        let mut joined = String::new();
        for line in text.lines() {
            if let Some(column) = &mut help {
                if line.trim().is_empty() {
                    continue;
                }
                let at = indent(line);
                let first = *column.get_or_insert(at);
                if at >= first && at > 0 {
                    continue;
                }
                help = None;
            }
            if let Some(head) = line.strip_suffix('\\') {
                joined.push_str(head);
                continue;
            }
            joined.push_str(line);
            let whole = std::mem::take(&mut joined);
            let whole = whole.trim();
            if matches!(whole, "help" | "---help---") {
                help = Some(None);
            } else if !whole.is_empty() && !whole.starts_with('#') {
                self.line(whole, depth)?;
            }
        }
        Ok(())
    }

    fn line(&mut self, line: &str, depth: usize) -> Result<(), Error> {
        let (word, rest) = line.split_once(|c: char| c.is_whitespace()).unwrap_or((line, ""));
        let rest = rest.trim();
        match word {
            "config" | "menuconfig" => {
                self.end_symbol();
                self.current = Current::Symbol { name: rest.to_owned(), own: Definition::default() };
            }
            "menu" | "choice" | "if" => {
                self.end_symbol();
                if self.frames.len() >= MAX_DEPTH {
                    let what = "its menus are nested too deeply".to_owned();
                    return Err(Error::NotKernelSource { dir: self.root.to_owned(), what });
                }
                self.frames.push(match word {
                    "menu" => Frame::Menu { depends: None, visible: None },
                    "choice" => Frame::Choice { depends: None, prompt: None },
                    _ => Frame::If(Expr::parse(rest)),
                });
                self.current = if word == "if" { Current::Nothing } else { Current::Frame };
            }
            "endmenu" | "endchoice" | "endif" => {
                self.end_symbol();
                self.frames.pop();
            }
            "comment" | "mainmenu" => self.end_symbol(),
            "source" => {
                self.end_symbol();
                let path = rest.trim_matches('"').replace("$(SRCARCH)", "x86").replace("$(srctree)/", "");
                if depth < MAX_DEPTH && !path.contains('$') {
                    self.file(Path::new(&path), depth + 1)?;
                    self.end_symbol();
                }
            }
            "depends" => self.depends(rest.strip_prefix("on").unwrap_or(rest)),
            "visible" => {
                let condition = rest.strip_prefix("if").and_then(Expr::parse);
                if let (Current::Frame, Some(Frame::Menu { visible, .. })) = (&self.current, self.frames.last_mut()) {
                    *visible = Expr::and(visible.take(), condition);
                }
            }
            "bool" | "tristate" | "string" | "int" | "hex" | "prompt" => self.prompt(rest),
            "select" => self.select(rest),
            _ => {}
        }
        Ok(())
    }

    fn depends(&mut self, text: &str) {
        // An unparsable condition is unevaluated, not met.
        let condition = Some(Expr::parse(text).unwrap_or_else(|| Expr::Unevaluated(text.trim().to_owned())));
        let depends = match (&mut self.current, self.frames.last_mut()) {
            (Current::Symbol { own, .. }, _) => &mut own.depends,
            (Current::Frame, Some(Frame::Menu { depends, .. } | Frame::Choice { depends, .. })) => depends,
            _ => return,
        };
        *depends = Expr::and(depends.take(), condition);
    }

    fn prompt(&mut self, rest: &str) {
        let Some(quote) = rest.chars().next().filter(|first| matches!(first, '"' | '\'')) else { return };
        let Some(end) = closing(&rest[1..], quote) else { return };
        let when = rest[1 + end + 1..].trim().strip_prefix("if").and_then(Expr::parse);
        let place = match (&mut self.current, self.frames.last_mut()) {
            (Current::Symbol { own, .. }, _) => &mut own.prompt,
            (Current::Frame, Some(Frame::Choice { prompt, .. })) => prompt,
            _ => return,
        };
        *place = Some(Prompt { when });
    }

    fn select(&mut self, rest: &str) {
        let Current::Symbol { name, own } = &self.current else { return };
        let (target, condition) = rest.split_once(" if ").map_or((rest, None), |(target, text)| (target, Some(text)));
        let Some(target) = target.split_whitespace().next() else { return };
        let condition = condition.and_then(Expr::parse);
        let when = Expr::and(own.depends.clone(), condition);
        self.symbols.selected.entry(target.to_owned()).or_default().push((name.clone(), when));
    }

    /// Completes the current symbol: adds the conditions of its enclosing blocks.
    fn end_symbol(&mut self) {
        let Current::Symbol { name, mut own } = std::mem::replace(&mut self.current, Current::Nothing) else { return };
        for frame in self.frames.iter().rev() {
            match frame {
                Frame::If(condition) => own.depends = Expr::and(condition.clone(), own.depends.take()),
                Frame::Menu { depends, visible } => {
                    own.depends = Expr::and(depends.clone(), own.depends.take());
                    if let (Some(prompt), Some(visible)) = (&mut own.prompt, visible) {
                        prompt.when = Expr::and(Some(visible.clone()), prompt.when.take());
                    }
                }
                Frame::Choice { depends, prompt } => {
                    own.of_choice = true;
                    own.depends = Expr::and(depends.clone(), own.depends.take());
                    let condition = prompt.clone().and_then(|prompt| prompt.when);
                    if let Some(prompt) = &mut own.prompt {
                        prompt.when = Expr::and(condition, prompt.when.take());
                    }
                }
            }
        }
        self.symbols.definitions.entry(name).or_default().push(own);
    }
}

/// Returns the indentation in columns; a tab advances to the next multiple of eight.
fn indent(line: &str) -> usize {
    let mut column = 0;
    for c in line.chars() {
        match c {
            ' ' => column += 1,
            '\t' => column = (column / 8 + 1) * 8,
            _ => break,
        }
    }
    column
}

/// Returns the position of the closing quote; an escaped quote does not close.
fn closing(text: &str, quote: char) -> Option<usize> {
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return Some(at),
            _ => {}
        }
    }
    None
}
