"""A headless Chromium that finds things by the text that people read."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from selenium.common.exceptions import (
    ElementClickInterceptedException,
    ElementNotInteractableException,
    StaleElementReferenceException,
)
from selenium.webdriver import ActionChains, Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

DIALOG = "//*[@role='dialog']"
MENU = "//*[@role='menu']"
WINDOW = (1600, 1000)
_POLL_S = 0.1
_STILL_S = 3.0
# The page was redrawn between looking and clicking, or something is still in front.
_TRY_AGAIN = (ElementClickInterceptedException, ElementNotInteractableException, StaleElementReferenceException)
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Browser:
    """One tab on one server.

    Args:
        driver: the running browser.
        url: the server.
        artifacts: folder of screenshots.
    """

    def __init__(self, driver: Chrome, url: str, artifacts: Path) -> None:
        self.driver = driver
        self._url = url
        self._artifacts = artifacts

    def open(self, path: str) -> None:
        """Loads a page; nothing of an earlier one is reused."""
        self.driver.get(self._url + path)

    @property
    def path(self) -> str:
        """Where the tab is now."""
        return self.driver.current_url.removeprefix(self._url)

    def text(self, xpath: str = "//body") -> str:
        """What is to be read in the last of the matching elements."""
        return self.until(lambda: self.driver.find_elements(By.XPATH, xpath)[-1].text, f"text in {xpath}")

    def all(self, xpath: str) -> list[WebElement]:
        """Visible elements."""
        return [element for element in self.driver.find_elements(By.XPATH, xpath) if element.is_displayed()]

    def shown(self, text: str, within: str = "") -> list[WebElement]:
        """Visible elements that say exactly this, the innermost ones."""
        says = f"normalize-space()='{text}'"
        return self.all(f"{within}//*[{says}][not(.//*[{says}])]")

    def wait_for(self, text: str, within: str = "", timeout_s: float = 30.0) -> WebElement:
        """The last element that says this; in a dialog that is the one in front."""
        return self.until(lambda: self.shown(text, within), f"{text!r} to be shown", timeout_s)[-1]

    def click(self, text: str, within: str = "", timeout_s: float = 30.0) -> None:
        """Clicks on a text once it is there, enabled, and nothing covers it."""

        def clicked() -> bool:
            found = self.shown(text, within)
            if found and not found[-1].find_elements(By.XPATH, "./ancestor-or-self::button[@disabled]"):
                # The driver itself would scroll it under what sticks to an edge.
                self.driver.execute_script("arguments[0].scrollIntoView({block: 'nearest'})", found[-1])
                found[-1].click()
                return True
            return False

        self.until(clicked, f"a click on {text!r}", timeout_s)

    def pick(self, xpath: str, shift: bool = False) -> None:
        """Clicks on something that may still be moving, once it rests; with shift, to add it to what is selected."""
        places: list[Any] = [None]

        def resting() -> WebElement | None:
            element = self.all(xpath)[-1]
            places.append(element.rect)
            return element if places[-1] == places[-2] else None

        element = self.until(resting, f"{xpath} to rest")
        actions = ActionChains(self.driver)
        (actions.key_down(Keys.SHIFT).click(element).key_up(Keys.SHIFT) if shift else actions.click(element)).perform()

    def hover(self, text: str) -> None:
        """Moves the pointer there."""
        ActionChains(self.driver).move_to_element(self.wait_for(text)).perform()

    def escape(self) -> None:
        """Closes the menu in front."""
        ActionChains(self.driver).send_keys(Keys.ESCAPE).perform()

    def run_script(self, script: str, *arguments: Any) -> Any:
        """Runs JavaScript in the page."""
        return self.driver.execute_script(script, *arguments)

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
        """Polls until `condition()` is true and returns its value; a failure shows the page."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(*_TRY_AGAIN, IndexError):
                if found := condition():
                    return found
            if time.monotonic() > deadline:
                picture = self.screenshot("failure")
                page = self.driver.find_element(By.XPATH, "//body").text
                raise AssertionError(f"waited {timeout_s:.0f} s for {what} at {self.path}; see {picture}:\n{page}")
            time.sleep(_POLL_S)

    def screenshot(self, name: str) -> Path:
        """Keeps what the window shows once nothing moves in it, or after a while."""
        path = self._artifacts / f"{name}.png"
        deadline, before = time.monotonic() + _STILL_S, b""
        while (picture := self.driver.get_screenshot_as_png()) != before and time.monotonic() < deadline:
            before = picture
            time.sleep(_POLL_S)
        path.write_bytes(picture)
        return path


@contextlib.contextmanager
def chromium(program: str, driver: str, profile: Path) -> Iterator[Chrome]:
    """Starts a browser with a fresh profile; ends it."""
    options = ChromeOptions()
    options.binary_location = program
    for flag in (*_FLAGS, f"--user-data-dir={profile}", f"--window-size={WINDOW[0]},{WINDOW[1]}"):
        options.add_argument(flag)
    running = Chrome(options=options, service=Service(driver))
    try:
        yield running
    finally:
        running.quit()
