//! Prints the table of failures for the documentation.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    print!("{}", firstlight_init::failures::print()?);
    Ok(())
}
