// Light, dark, or as the system has it. Only the choice is stored.
export type Theme = 'system' | 'light' | 'dark'
const KEY = 'liver-theme'
const systemIsDark = () => typeof matchMedia === 'function' && matchMedia('(prefers-color-scheme: dark)').matches

export function storedTheme(): Theme {
  try {
    const stored = localStorage.getItem(KEY)
    return stored === 'light' || stored === 'dark' ? stored : 'system'
  } catch {
    return 'system'
  }
}

export function applyTheme(theme: Theme): void {
  document.documentElement.dataset.theme = theme === 'system' ? (systemIsDark() ? 'dark' : 'light') : theme
  try {
    localStorage.setItem(KEY, theme)
  } catch {
    // A browser that stores nothing shows what was chosen until the page is left.
  }
  dispatchEvent(new Event('liver-theme'))
}

if (typeof matchMedia === 'function') {
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => storedTheme() === 'system' && applyTheme('system'))
}
