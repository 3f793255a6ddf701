//! Long texts in parts: an encoding takes many times the memory of its text.

/// Longer texts are cut.
const LONG: usize = 1 << 20;

/// Whether a pattern never matches from one line into a word, number or sign of the next, so that the place after a line's
/// end and before what is no space is always between two matches. Known of the patterns that begin words with
/// `\p{L}`-classes and take line ends in with spaces or signs before them; told by what they are made of.
pub(super) fn splits_lines(pattern: &str) -> bool {
    let letters = pattern.contains(r"[^\r\n\p{L}\p{N}]?") || pattern.contains(r" ?\p{L}+");
    letters && pattern.contains(r"\s+(?!\S)") && !pattern.contains(r"[\s\S]") && !pattern.contains("(?s)")
}

/// The parts of a text, one if it is short or must not be cut. They lie in the text, back to back.
pub(super) fn parts(text: &str, cuts: bool) -> impl Iterator<Item = &str> {
    parts_of(text, if cuts { LONG } else { usize::MAX })
}

fn parts_of(text: &str, most: usize) -> impl Iterator<Item = &str> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let whole = rest.take()?;
        let cut = if whole.len() > most { cut(whole, most) } else { None };
        let Some(at) = cut else { return Some(whole) };
        let (part, more) = whole.split_at(at);
        rest = Some(more);
        Some(part)
    })
}

/// The first place from `from` on after the end of a line that does not end in a space, and before what is no space. (Of
/// several spaces the last may go with what follows.)
fn cut(text: &str, from: usize) -> Option<usize> {
    let bytes = text.as_bytes();
    let mut at = from;
    loop {
        at += 1 + bytes.get(at..)?.iter().position(|&byte| byte == b'\n')?;
        let (before, after) = text.split_at_checked(at)?;
        let spaces = before.chars().rev().take(2).filter(|c| c.is_whitespace()).count();
        if spaces == 1 && !after.chars().next()?.is_whitespace() {
            return Some(at);
        }
    }
}

/// Longest run of spaces that the regular expressions of pre-tokenizers are asked to match: beyond about a million steps
/// back their engine gives up without a word.
const MOST_SPACES: usize = 400_000;

/// The length of a run of spaces that is too long, if there is one.
pub(super) fn too_many_spaces(text: &str) -> Option<usize> {
    if text.len() <= MOST_SPACES {
        return None;
    }
    let (mut run, mut longest) = (0, 0);
    for c in text.chars() {
        run = if c.is_whitespace() { run + 1 } else { 0 };
        longest = longest.max(run);
    }
    (longest > MOST_SPACES).then_some(longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_the_text_and_begin_lines() {
        let text = "one\ntwo\n\n  three \u{e9}\nfour\r\nfive\nsix\n\u{a0}x";
        for most in 1..text.len() {
            let parts: Vec<&str> = parts_of(text, most).collect();
            assert_eq!(parts.concat(), text);
            for pair in parts.windows(2) {
                assert!(pair[0].ends_with('\n') && !pair[1].starts_with(char::is_whitespace), "{parts:?}");
            }
        }
        let parts: Vec<&str> = parts_of(text, 4).collect();
        assert_eq!(parts, ["one\ntwo\n\n  three \u{e9}\n", "four\r\nfive\n", "six\n\u{a0}x"]);
        assert_eq!(parts_of("no line's end", 3).count(), 1);
        assert_eq!(parts_of("", 3).collect::<Vec<_>>(), [""]);
    }
}
